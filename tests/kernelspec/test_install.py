"""The kernel that starts with the extension: written by the command, found by Jupyter, and used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dsv4nb
from dsv4nb.kernelspec.install import FILES, for_this_python, install, main, spec

ROOT = Path(dsv4nb.__file__).parents[1]
KERNELS = ("share", "jupyter", "kernels", "dsv4nb")


def test_the_kernel_starts_this_python_and_finds_the_checkout_if_it_must() -> None:
    installed = for_this_python(spec(), is_installed=True)
    assert installed["argv"] == [sys.executable, *spec()["argv"][1:]] and "env" not in installed
    checkout = for_this_python(spec(), is_installed=False)
    expected = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), "${PYTHONPATH}"])
    assert checkout == {**installed, "env": {"PYTHONPATH": expected}}


def test_the_logos_are_pictures_of_their_size() -> None:
    for size in (32, 64):
        png = (ROOT / "dsv4nb" / "kernelspec" / f"logo-{size}x{size}.png").read_bytes()
        assert png[:8] == b"\x89PNG\r\n\x1a\n" and len(png) < 4000
        assert (int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")) == (size, size)
    svg = (ROOT / "dsv4nb" / "kernelspec" / "logo-svg.svg").read_text(encoding="utf-8")
    assert svg.startswith("<svg ") and "script" not in svg


def test_the_command_writes_a_kernel_and_replaces_an_older_one(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("jupyter_client")
    folder = tmp_path.joinpath(*KERNELS)
    folder.mkdir(parents=True)
    (folder / "older").touch()
    assert main(["install", "--prefix", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"DeepSeek V4 (dsv4nb): {folder}\n"
    assert sorted(file.name for file in folder.iterdir()) == sorted(FILES)
    written = json.loads((folder / "kernel.json").read_text(encoding="utf-8"))
    assert written["argv"][0] == sys.executable and written["argv"][-2:] == ["--ext", "dsv4nb"]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("jupyter_client")
    (tmp_path / "file").touch()
    assert main(["install", "--prefix", str(tmp_path / "file")]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("the kernel cannot be written: ") and "--user or --prefix DIR" in said[-1]


def test_without_jupyter_the_command_says_what_to_install(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jupyter_client.kernelspec", None)
    assert main(["install", "--user"]) == 1
    assert "pip install 'dsv4nb[jupyter]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["install"], ["install", "--user", "--prefix", "x"]], ids=str)
def test_a_bad_command_line_is_refused(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2 and "usage: python -m dsv4nb.kernelspec" in capsys.readouterr().err


@pytest.mark.notebook
def test_j28_the_magics_are_there_in_the_first_cell(tmp_path: Path) -> None:
    """In a kernel that was started by its name, as Jupyter does it."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import KernelManager

    install(prefix=str(tmp_path))
    listed = subprocess.run(
        [sys.executable, "-m", "jupyter_client.kernelspecapp", "list", "--json"],
        env=dict(os.environ, JUPYTER_PATH=str(tmp_path / "share" / "jupyter")),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(listed.stdout)["kernelspecs"]["dsv4nb"]
    assert found["spec"]["display_name"] == "DeepSeek V4 (dsv4nb)"
    specs = KernelSpecManager(kernel_dirs=[str(tmp_path / "share" / "jupyter" / "kernels")])
    manager = KernelManager(kernel_name="dsv4nb", kernel_spec_manager=specs)
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        shown: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            if message["msg_type"] == "display_data":
                shown.append(message["content"]["data"]["text/plain"])

        reply = client.execute_interactive("%dsv4 status", output_hook=hook, timeout=60)
        assert reply["content"]["status"] == "ok" and reply["content"]["execution_count"] == 1
        assert shown == ["no model is loaded; %dsv4 load PATH loads one"]
        completed = client.complete("%dsv4 stat", reply=True, timeout=30)["content"]
        assert (completed["matches"], completed["cursor_start"]) == (["status"], 6)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
