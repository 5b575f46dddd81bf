"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

pytestmark = pytest.mark.notebook


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text("\n".join(block for block in BLOCKS if not block.startswith("%")), encoding="utf-8")
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=True, timeout=120, stdout=subprocess.DEVNULL)


def test_the_cells_of_the_readme_run() -> None:
    cells = [block for block in BLOCKS if block.startswith("%")]
    assert len(cells) == 2
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    try:
        for cell in cells:
            shell.run_cell(cell).raise_error()
        assert "85" in shell.user_ns["_dsv4"].text
        shell.user_ns["m"].close()
    finally:
        InteractiveShell.clear_instance()


def test_the_pictures_are_there() -> None:
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(pictures) >= 10 and all((ROOT / picture).is_file() for picture in pictures)
