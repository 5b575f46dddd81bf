"""The page's own tests, and whether the committed bundle is what its sources give."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WIDGETS = HERE.parents[1] / "dsv4nb/widgets"
NODE = shutil.which("node")

needs_node = pytest.mark.skipif(NODE is None, reason="there is no node on this machine")


@needs_node
@pytest.mark.parametrize("script", sorted(HERE.glob("*.test.mjs")), ids=lambda path: path.name)
def test_the_scripts_tests_pass(script: Path) -> None:
    assert NODE
    done = subprocess.run([NODE, "--test", str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_node
def test_the_bundle_is_what_its_sources_give(tmp_path: Path) -> None:
    if not (WIDGETS / "node_modules/esbuild").exists():
        pytest.skip("esbuild is not installed: npm ci in dsv4nb/widgets")
    assert NODE
    subprocess.run([NODE, str(WIDGETS / "build.mjs"), str(tmp_path)], check=True, capture_output=True, timeout=60)
    built = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert built == {path.name: path.read_bytes() for path in (WIDGETS / "static").iterdir()}, "run npm run build"


def test_the_lock_names_one_version_and_no_address() -> None:
    lock = (WIDGETS / "package-lock.json").read_text()
    assert '"resolved"' not in lock
    assert '"esbuild": "0.28.2"' in lock and '"esbuild": "0.28.2"' in (WIDGETS / "package.json").read_text()
