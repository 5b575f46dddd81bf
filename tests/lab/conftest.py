"""A JupyterLab of its own and the system's Chromium, for one module of tests.

`DSV4NB_APP=notebook` runs Notebook 7 in its place; a folder in front of `PYTHONPATH` brings another ipykernel.
`hosts.py` goes through all of them.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
ROOT = Path(__file__).parents[2]
APP = os.environ.get("DSV4NB_APP", "lab")
# Notebook 7.6.5 says this of a page without any widget too
OWN_FAULTS = ["Cannot read properties of undefined (reading 'schema')"] if APP == "notebook" else []
PICTURES = Path(__file__).parent / "pictures"
MOST_DIFFERENT = 0.02  # of a picture: fonts are drawn a little differently on every machine
FAR = 48  # of 255, in one colour
# between two pixels every edge would be drawn in one of two ways
ON_A_PIXEL = """it => {
  const { left, top } = it.getBoundingClientRect();
  it.style.translate = `${Math.round(left) - left}px ${Math.round(top) - top}px`;
}"""
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
        place = f"notebooks/{path}" if APP == "notebook" else f"lab/workspaces/{workspace}/tree/{path}"
        self.page.goto(f"{self.url}/{place}?token={self.token}{reset_}")
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=60_000)
        self._within_a_minute(
            """async () => {
              const soon = () => new Promise((go) => setTimeout(go, 50));
              let panel;
              while (!(panel = window.jupyterapp?.shell.currentWidget)?.context) await soon();
              await panel.context.ready;
              await panel.sessionContext.ready;
              const kernel = panel.sessionContext.session.kernel;
              await kernel.info;
              while (["starting", "unknown"].includes(kernel.status)) await soon();
            }"""
        )

    def command(self, name: str, **arguments: object) -> Any:
        """Run a command of JupyterLab and wait for it; Notebook 7 has no area at the left."""
        if APP == "notebook" and name == "application:toggle-left-area":
            return None
        execute = "([name, args]) => window.jupyterapp.commands.execute(name, args)"
        return self._within_a_minute(execute, [name, arguments])

    def run_cell(self, index: int) -> None:
        """Run one cell and wait for its end."""
        self._choose(index)
        self.command("notebook:run-cell")

    def start_cell(self, index: int) -> None:
        """Start one cell; not waited for, the command ends with the cell."""
        self._choose(index)
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell'); }")

    def _choose(self, index: int) -> None:
        self.page.evaluate("i => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = i; }", index)

    def _within_a_minute(self, script: str, argument: object = None) -> Any:
        """Run what waits for the kernel, which may have lost a message and never answers."""
        limited = f"""async (it) => {{
          const late = new Promise((_, fail) => setTimeout(() => fail(new Error("no answer in a minute")), 60_000));
          return await Promise.race([({script})(it), late]);
        }}"""
        return self.page.evaluate(limited, argument)

    def run_all(self) -> None:
        """Start all cells; not waited for, the command ends with the last cell."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")

    def restart(self) -> None:
        """Restart the kernel and wait for it."""
        self._within_a_minute(
            "async () => { await window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart(); }"
        )

    def ask(self, text: str, *, nth: int = 0) -> None:
        """Send a message to one of the page's chats; -1 is the last."""
        box = self.page.get_by_role("textbox", name="Message", exact=True).nth(nth)
        box.fill(text)
        box.press("Enter")

    def idle(self, turns: int, *, nth: int = 0) -> None:
        """Wait until one of the page's chats has so many turns and none is running; -1 is the last."""
        self.page.wait_for_function(
            """([turns, nth]) => {
              const chat = [...document.querySelectorAll(".dsv4-chat")].at(nth);
              return chat?.dataset.phase === "idle" && chat.dataset.status === "idle"
                && chat.querySelectorAll(".dsv4-turn").length === turns;
            }""",
            arg=[turns, nth],
        )

    def size(self, width: int, height: int = 860) -> None:
        """Give the window another size; half the width is what a zoom of 200 % leaves."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.wait_for_timeout(200)

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
    lab.page.on("pageerror", lambda error: None if str(error) in OWN_FAULTS else lab.problems.append(str(error)))
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
    module, name = ("notebook", "JupyterNotebookApp") if APP == "notebook" else ("jupyterlab", "LabApp")
    command = [
        *(sys.executable, "-m", module, "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"),
        *("--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"),
        *("--LabApp.news_url=None", f"--{name}.user_settings_dir={home}/settings"),
        *(f"--{name}.workspaces_dir={home}/workspaces", f"--{name}.expose_app_in_browser=True"),
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
def axe(lab: Lab) -> Callable[[str], None]:
    """Fails when an element breaks a rule of accessibility that matters."""
    script = ROOT / "dsv4nb/widgets/node_modules/axe-core/axe.min.js"
    if not script.exists():
        pytest.skip("axe-core is not installed: npm ci in dsv4nb/widgets")

    def check(selector: str) -> None:
        lab.page.evaluate(script.read_text(encoding="utf-8"))
        found = lab.page.evaluate("async it => (await axe.run(it, {iframes: false})).violations", selector)
        told = [
            f"{one['impact']}: {one['help']}: {node['html'][:200]}"
            for one in found
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]
        assert not told, "\n".join(told)

    return check


@pytest.fixture
def picture(lab: Lab, shots: Path) -> Callable[..., None]:
    """Compares an element with its stored picture; `DSV4NB_PICTURES=write` stores what is seen now.

    The theme becomes part of the name. `mask` hides what changes from run to run.
    """

    def compare(element: Any, name: str, *, mask: Sequence[Any] = ()) -> None:
        is_light = lab.page.evaluate("document.body.dataset.jpThemeLight") == "true"
        file = PICTURES / f"{name}-{'light' if is_light else 'dark'}.png"
        lab.page.mouse.move(0, 0)
        window = lab.page.viewport_size
        lab.size(window["width"], max(window["height"], int(element.bounding_box()["height"]) + 300))
        element.scroll_into_view_if_needed()  # what is outside the notebook's own window is not in the picture
        element.evaluate(ON_A_PIXEL)
        seen = element.screenshot(
            mask=list(mask), mask_color="#808080", animations="disabled", caret="hide", scale="css"
        )
        element.evaluate("it => { it.style.translate = ''; }")
        lab.page.set_viewport_size(window)
        if APP == "notebook":  # its columns have another width
            return
        if os.environ.get("DSV4NB_PICTURES") == "write":
            PICTURES.mkdir(exist_ok=True)
            Image.open(io.BytesIO(seen)).quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)
            return
        (shots / file.name).write_bytes(seen)
        assert file.exists(), f"{file.name} is not stored; DSV4NB_PICTURES=write stores it"
        told = difference(Image.open(file), Image.open(io.BytesIO(seen)))
        assert told <= MOST_DIFFERENT, f"{told:.2%} of {file.name} differ; what was seen: {shots / file.name}"

    return compare


def difference(stored: Image.Image, seen: Image.Image) -> float:
    """Return the share of pixels that a reader would see differ; what only one of the two has differs."""
    one, other = (np.asarray(image.convert("RGB"), np.int16) for image in (stored, seen))
    height, width = min(one.shape[0], other.shape[0]), min(one.shape[1], other.shape[1])
    far = (np.abs(one[:height, :width] - other[:height, :width]).max(-1) > FAR).sum()
    area = max(one.shape[0], other.shape[0]) * max(one.shape[1], other.shape[1])
    return float((far + area - height * width) / area)


@pytest.fixture
def quiet(lab: Any) -> Iterator[None]:
    """The page reports no error and asks nobody but its server."""
    lab.problems.clear()
    lab.strangers.clear()
    yield
    assert lab.problems == []
    assert lab.strangers == []
