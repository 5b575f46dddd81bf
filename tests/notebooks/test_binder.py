"""Binder: its list of packages is that of the package, and what it builds runs the tour in little memory."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
import tomllib
import urllib.error
import urllib.parse
import urllib.request
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
BINDER = ROOT / "binder"
TOY = ROOT / "dsv4nb/toy/model"
LIMIT_BYTES = 1.8e9  # J-24
LEFT_OUT = {"triton"}  # see postBuild

# executes a notebook, and prints the peak memory of itself and of the kernel
EXECUTE = """
import resource, sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=180, coalesce_streams=True).execute()
nbformat.write(notebook, sys.argv[2])
print(sum(1024 * resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""


def listed(path: Path) -> dict[str, Requirement]:
    """The requirements of a file by name, without its comments and options."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    found = [Requirement(line) for line in lines if line and not line.startswith("-")]
    return {canonicalize_name(one.name): one for one in found}


def pinned(requirement: Requirement) -> str:
    """The one version that a requirement allows, without its local part (+cpu)."""
    (one,) = requirement.specifier
    assert one.operator == "==", requirement
    return one.version.partition("+")[0]


def test_the_list_is_that_of_the_package_but_for_triton() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = map(Requirement, [*project["dependencies"], *extras["jupyter"], *extras["constrained"]])
    wanted = {canonicalize_name(one.name): one for one in needed}
    ours = listed(BINDER / "requirements.txt")
    assert set(ours) == set(wanted) - LEFT_OUT
    for name, requirement in ours.items():
        assert wanted[name].specifier.contains(pinned(requirement)), f"{requirement} does not fit {wanted[name]}"


def test_the_versions_are_those_of_ci() -> None:
    tested = listed(ROOT / ".ci/constraints.txt")
    for name, requirement in listed(BINDER / "requirements.txt").items():
        assert pinned(requirement) == pinned(tested[name]), name


def test_no_build_for_a_gpu_can_be_picked() -> None:
    text = (BINDER / "requirements.txt").read_text(encoding="utf-8")
    assert re.search(r"^torch==[\d.]+\+cpu$", text, re.MULTILINE)
    assert "--extra-index-url https://download.pytorch.org/whl/cpu\n" in text


def test_the_build_stops_at_the_first_error() -> None:
    script = (BINDER / "postBuild").read_text(encoding="utf-8")
    code = [line for line in script.splitlines() if line and not line.startswith("#")]
    assert script.startswith("#!/usr/bin/env bash\n") and code[0] == "set -euo pipefail"
    assert os.access(BINDER / "postBuild", os.X_OK)


@pytest.mark.notebook
@pytest.mark.timeout(1200)
def test_j24_what_it_builds_runs_the_tour_in_little_memory(tmp_path: Path) -> None:
    if not (TOY / "config.json").exists():
        pytest.skip("the bundled model is not in dsv4nb/toy/model")
    home = tmp_path / "home"
    home.mkdir()
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {
        "HOME": str(home),
        "PATH": f"{programs}{os.pathsep}{env['PATH']}",
        "PIP_CONSTRAINT": str(ROOT / ".ci/constraints.txt"),
        "PIP_RETRIES": "0",  # an index that cannot be reached is left out at once
    }

    def run(*command: object, cwd: Path = ROOT) -> str:
        done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    run(programs / "python", "-m", "pip", "install", "-q", "-r", BINDER / "requirements.txt")
    assert "The capital of France is Paris." in run("bash", BINDER / "postBuild")

    names = "from importlib.metadata import distributions; print(*(one.name for one in distributions()))"
    installed = {canonicalize_name(name) for name in run(programs / "python", "-c", names).split()}
    assert {"dsv4nb", "torch"} <= installed
    assert not [name for name in installed if name.startswith(("nvidia", "cuda")) or name in LEFT_OUT]

    executed = tmp_path / "tour.ipynb"
    used = int(run(programs / "python", "-c", EXECUTE, ROOT / "notebooks/01_tour.ipynb", executed, cwd=home))
    assert "silver otter" in executed.read_text(encoding="utf-8")
    begins_at, server = _serve(programs, env, home)
    assert begins_at == "/lab/tree/notebooks/01_tour.ipynb"
    assert 0 < used + server < LIMIT_BYTES, f"{used / 1e9:.2f} GB for the tour and {server / 1e9:.2f} GB for JupyterLab"


def _serve(programs: Path, env: dict[str, str], home: Path) -> tuple[str, int]:
    """Start JupyterLab; return where an address without a path leads, and the most memory it had by then."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [programs / "jupyter", "lab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--IdentityProvider.token=t0k", "--ServerApp.port_retries=0"]
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=home, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        for _ in range(240):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/?token=t0k", timeout=5) as page:
                    return urllib.parse.urlsplit(page.url).path, _most_memory(server.pid)
            except (urllib.error.URLError, ConnectionError):
                assert server.poll() is None, (home / "log").read_text()
                time.sleep(0.25)
        raise AssertionError((home / "log").read_text())
    finally:
        server.terminate()
        server.wait(20)


def _most_memory(pid: int) -> int:
    """The most bytes that a process has had; Linux tells."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    most = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    assert most
    return 1024 * int(most[1])
