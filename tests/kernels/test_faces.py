"""Every operation has a twin and a test of the same name."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TWINS = ROOT / "kernels" / "dsv4nb_kernels" / "reference"
FORBIDDEN = re.compile(r"^\s*(from|import) (dsv4nb|triton)\b", re.MULTILINE)


def names(folder: Path, prefix: str = "") -> set[str]:
    found = {path.stem.removeprefix(prefix) for path in folder.glob(f"{prefix}*.py")}
    return {name for name in found if not name.startswith("_")}


def test_every_twin_has_a_test_and_every_test_a_twin() -> None:
    assert names(TWINS) == names(ROOT / "tests" / "kernels", "test_") - {"faces"}


def test_twins_import_neither_the_product_nor_triton() -> None:
    for path in TWINS.glob("*.py"):
        assert not FORBIDDEN.search(path.read_text()), path.name
