"""Notebooks are stored clean, and run from top to bottom on the bundled model."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import nbformat
import pytest

import dsv4nb
from dsv4nb import rounds, testing

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TOY = ROOT / "dsv4nb/toy/model"

EXPECTED = {
    "01_tour": ["Paris", "85", "get_weather", "tool_calls", "silver otter"],
    "03_sampling": [
        "The door code is amber falcon.",
        "the same ids: True",
        "replay_mismatch: ",
        "{'top_k': 3}            3        3",
        "generated  The code word is silver otter.",
        "more 'N': Noted.",
        "The capital of France is Paris.  first token: rank 1",
        '{"a": 47, "b": 38, "sum": 85}',
        "{'a': 58, 'b': 36, 'sum': 94}",
        "It is 21 degrees and sunny in Oslo.",
        "[('Anna', 'I found the silver otter. Yours, toy')]",
        "Not run: the user declined this call.",
        "{'max_new': 8}           length  1, 2, 3,",
        "did you mean 'temperature'?",
    ],
    "04_speculation": [
        "window      off, at most 6 rows",
        "' falcon'              next, a correction",
        "' amber'   same choice: True",
        "'al'       not judged",
        "On[ce] upon a time there was a small[ dragon][ that] lived",
        ", 10.    5 + 1",
        " texts, 0 of the speculated replies differ from the plain ones",
        "coupled    tau 2.",
        "  16 of 16 replies are the plain ones\ngreedy",
        "  16 of 16 replies are the plain ones\nrejection",
        "\n0.5       5.4",
        "fastest     ",
        "confidences as the drafter gave them",
        "262 tokens: The code word is[ g]re[en][ t][ig]er.",
        '{"a": [4][7], "b": 38, "sum": [8][5]} 85',
        " the[ ][ask][ me]",
        "● └─ 2. Tell me a story about a dragon. → Once upon a time there was a small dragon that [stopped]",
        "oracle    6.00 tokens a round, the same ids: True",
        "wrong     1.00 tokens a round, the same ids: True",
        "doubtful  1.00 tokens a round, the same ids: True",
        "toy: 6 checks, 6 ok",
    ],
    "05_cache_and_forks": [
        "reset      0 reused  1211 computed",
        "reused    10 computed",
        "reused     8 computed",
        "window: 64 tokens",
        "' code word?<｜Assistant｜></think>'",
        "The prompt leaves the cache at token 6, with id ",
        "→ 47 + 38 = 85.",
        "'</think>47 + 38 ='",
        "reused    33 computed",
        "reused     0 computed",
        "[True, True, True, True]",
        "anchor   640 reused     4 computed",
        "'reply': '58 + 36 = 94.', 'reply_stop_reason': 'stop'",
        "otter.dsv4 was changed since it was written: cache/",
        "The capital of Cuba is Havana.",
        "code 'model = load(path)'",
        "'exact': 1}",
    ],
}

# where a notebook may import from
PUBLIC = {module.__name__: module.__all__ for module in (dsv4nb, rounds, testing)}

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def printed(notebook: nbformat.NotebookNode) -> str:
    """Everything a reader of the executed notebook sees as text."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(
        output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain", "")
        for output in outputs
    )


def python(source: str) -> str:
    """The Python of a cell, without magics."""
    return "" if source.startswith("%%") else "\n".join(x for x in source.splitlines() if not x.startswith("%"))


@each
def test_is_stored_clean(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, f"{path.name} cell {i} has outputs"
            assert len(cell.source.splitlines()) <= 15, f"{path.name} cell {i} is too long"


@each
def test_uses_public_names_only(path: Path) -> None:
    for cell in read(path).cells:
        if cell.cell_type != "code":
            continue
        for node in ast.walk(ast.parse(python(cell.source))):
            assert not isinstance(node, ast.ClassDef), "a notebook defines no classes"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dsv4nb"):
                assert {name.name for name in node.names} <= set(PUBLIC.get(node.module or "", ()))
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_"), node.attr


@each
def test_every_code_cell_is_introduced(path: Path) -> None:
    cells = read(path).cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    runs = re.findall(r"c+", "".join(cell.cell_type[0] for cell in cells))
    assert max(map(len, runs)) <= 2, "text between the cells"


@pytest.mark.notebook
@each
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (TOY / "config.json").exists():
        pytest.skip("the bundled model is not in dsv4nb/toy/model")
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "kernels")]))
    notebook = read(path)
    # a flush in the middle of a line begins another output
    client = NotebookClient(
        notebook, timeout=120, coalesce_streams=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    text = printed(notebook)
    for part in EXPECTED[path.stem]:
        assert part in text
    drawn = re.findall(r"^seed (\d): (.*)$", text, re.MULTILINE)
    assert len(set(drawn)) == len({seed for seed, _ in drawn}), "one seed, one reply"
