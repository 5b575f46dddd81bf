"""A JupyterLab of its own and the system's Chromium, for one module of tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pytest

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
ROOT = Path(__file__).parents[2]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class Lab:
    """A page of a running JupyterLab.

    Attributes:
        problems: uncaught errors and console errors of the page.
        strangers: addresses outside this machine that the page asked for.
    """

    page: Any
    root: Path
    url: str
    token: str
    problems: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    def write(self, name: str, *cells: str) -> str:
        """Store a notebook of code cells; return its file name."""
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook = nbformat.v4.new_notebook(
            metadata={"kernelspec": kernel}, cells=[nbformat.v4.new_code_cell(cell) for cell in cells]
        )
        nbformat.write(notebook, self.root / f"{name}.ipynb")
        return f"{name}.ipynb"

    def open(self, path: str, *, workspace: str = "t", reset: bool = True) -> None:
        """Open a notebook and wait for its kernel; what is run before that is lost."""
        reset_ = "&reset" if reset else ""
        self.page.goto(f"{self.url}/lab/workspaces/{workspace}/tree/{path}?token={self.token}{reset_}")
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=60_000)
        self.page.evaluate(
            """async () => {
              const panel = window.jupyterapp.shell.currentWidget;
              await panel.context.ready;
              await panel.sessionContext.ready;
              const kernel = panel.sessionContext.session.kernel;
              await kernel.info;
              while (["starting", "unknown"].includes(kernel.status)) await new Promise((go) => setTimeout(go, 50));
            }"""
        )

    def command(self, name: str, **arguments: object) -> Any:
        """Run a command of JupyterLab and wait for it."""
        return self.page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args)", [name, arguments])

    def run_all(self) -> None:
        """Start all cells; not waited for, the command ends with the last cell."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")

    def theme(self, *, dark: bool) -> None:
        """Change the theme; its style sheet arrives after the attribute."""
        self.command("apputils:change-theme", theme="JupyterLab Dark" if dark else "JupyterLab Light")
        self.page.wait_for_function("dark => document.body.dataset.jpThemeLight === String(!dark)", arg=dark)
        self.page.wait_for_timeout(600)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab, open in a browser."""
    pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
    with _browser() as page:
        root = tmp_path_factory.mktemp("root")
        with _server(root) as (url, token):
            lab = Lab(page=page, root=root, url=url, token=token)
            _listen(lab)
            yield lab


@pytest.fixture(scope="module")
def blank() -> Iterator[Any]:
    """An empty page."""
    with _browser() as page:
        yield page


@contextlib.contextmanager
def _browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not Path(CHROMIUM).exists():
        pytest.skip("there is no chromium on this machine")
    profile = tempfile.mkdtemp(prefix="chromium-")
    with playwright.sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, args=FLAGS, viewport={"width": 1200, "height": 860}
        )
        try:
            yield context.pages[0]
        finally:
            context.close()
            shutil.rmtree(profile, ignore_errors=True)


def _listen(lab: Lab) -> None:
    lab.page.on("pageerror", lambda error: lab.problems.append(str(error)))
    lab.page.on("console", lambda said: lab.problems.append(said.text) if said.type == "error" else None)
    local = ("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:", "about:")
    lab.page.on("request", lambda it: None if it.url.startswith(local) else lab.strangers.append(it.url))


@contextlib.contextmanager
def _server(root: Path) -> Iterator[tuple[str, str]]:
    home = Path(tempfile.mkdtemp(prefix="jupyter-"))
    settings = home / "settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    port, token = _free_port(), "t0k"
    env = dict(
        os.environ,
        JUPYTER_CONFIG_DIR=f"{home}/config",
        JUPYTER_DATA_DIR=f"{home}/data",
        JUPYTER_RUNTIME_DIR=f"{home}/run",
        IPYTHONDIR=f"{home}/ipython",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]),
    )
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"),
        *("--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"),
        *("--LabApp.news_url=None", f"--LabApp.user_settings_dir={home}/settings"),
        *(f"--LabApp.workspaces_dir={home}/workspaces", "--LabApp.expose_app_in_browser=True"),
    ]
    url = f"http://127.0.0.1:{port}"
    with (home / "log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while not _answers(f"{url}/api/status?token={token}"):
            assert process.poll() is None and time.monotonic() < deadline, (home / "log").read_text()
            time.sleep(0.25)
        yield url, token
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        shutil.rmtree(home, ignore_errors=True)


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):
        return True
    return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures go: a folder that is looked at, if the environment names one."""
    return Path(os.environ.get("DSV4NB_SHOTS") or tmp_path_factory.mktemp("shots"))


@pytest.fixture
def quiet(lab: Any) -> Iterator[None]:
    """The page reports no error and asks nobody but its server."""
    lab.problems.clear()
    lab.strangers.clear()
    yield
    assert lab.problems == []
    assert lab.strangers == []
