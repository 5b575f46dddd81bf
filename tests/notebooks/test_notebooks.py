"""Notebooks are stored clean, and run from top to bottom on the bundled model."""

from __future__ import annotations

import ast
import html
import os
import re
import resource
from collections.abc import Sequence
from pathlib import Path

import nbformat
import pytest

import dsv4nb
from dsv4nb import rounds, testing

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TOY = ROOT / "dsv4nb/toy/model"
CPU_SECONDS = 120.0  # of one notebook at most, on whatever machine

EXPECTED = {
    "01_tour": ["Paris", "85", "get_weather", "tool_calls", "silver otter"],
    "02_chat_and_tools": [
        "(41 of 55 tokens of the prompt)",
        "[{'role': 'system', 'content': 'The code word is silver otter.'}]",
        "Ones: 8 + 6 = 14.",
        "The turn before: 42 tokens of reasoning, 54 in all",
        "cancelled with the text so far: True",
        "chat_busy: ",
        "12 - 5 = 7.",
        "It is 4 degrees and sunny in Oslo.",
        "ToolResult\nPromptUsage\n  'It is 14:30 in Rome.'\nDone",
        "required ['day', 'people']",
        "Rome is warmer, and it is half past two there.",
        'must be one of "Friday", "Saturday", not "Sunday"; people must be an integer, not "four"',
        "did you mean book_table?",
        "Error: KeyError: 'Lima'",
        "In Madrid is 6 degrees and sunny in Madrid.\n  get_weather",
        "no answer\n  get_weather",
        "Not run: this turn has had 2 rounds of calls.",
        '{"from": "2026-12-01", "open": [false, true]}',
        "[10,000 more characters left out]",
        "{'capital': 'Lima'}",
        "Not run: the user declined this call.",
        "[('Ben', 'Dinner on Friday!')]",
        "('Ben', 'I found the silver otter, at last')",
        "It is 19 degrees and cloudy in Rome.",
        "The code word of Ben is amber falcon.",
        "○ └─ 4. What is the capital of Cuba? → The capital of Cuba is Havana.",
        "['What is the capital of Peru?', 'What is the door code?', 'Hello!']",
        "the same messages: True",
    ],
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
    "06_inside_the_model": [
        "● └─ 2. Tell me a story about a dragon. → Once upon a time",
        "toy: 26 of 26 tokens, layers 0-5",
        "layer 4 The capital of F r an ce is P ort is ban",
        "layer 5 The capital of F r an ce is P ar is .",
        "layer 0: 1+5\nlayer 1: 0+7\nlayer 2: 0+2 1+5",
        "next: ' Tokyo'",
        "262 tokens, and next: ' silver'",
        "32 entries picked, 97% of the attention",
        "' word is silver otter. Anna went from'",
        "' otter'  5% and 82%",
        "without layer 2, attention The capital of France is Paris. 1 + 1 = 5. The code word is silver otter.",
        "without layer 4, attention The capital of France is Paris. 47 + 38 = 85. The code word is silver basket.",
        "without layer 5, experts The capital of France is Portland.",
        "Japan +13.6, China -14.6",
        "they differ at [6, 7] of 262",
    ],
    "07_kernels": [
        "FP4: 11.8% off",
        "unpacked, the same bytes: (True, True)",
        "each piece: (1, 8) (1, 40) (9, 8) (9, 40)",
        "4.25 bits for each weight\nthe same bytes: [True, True]",
        "row 0 alone and among six, equal: False",
        "256 of 256 numbers are the same to the last bit",
        "\n0 of 36 differ",
        "35 of 36 differ",
        "fp8_rows, q_b half        16.8      3.94     4.31 µs  91%     4.85 µs  81%",
    ],
    "acceptance": ["9 requests refused by name", "16 of 16 met"],
    "benchmarks": [
        "temperature 1: 6 prompts, 182 tokens, the same texts",
        "order: on off off on",
        "next turn, live on: 15 rows computed",
        "another try, anchors on: 8 rows computed",
        "ms a token, greedy",
    ],
}

# where a notebook may import from; the one about kernels looks into theirs
PUBLIC: dict[str, Sequence[str]] = {module.__name__: module.__all__ for module in (dsv4nb, rounds, testing)}
PUBLIC |= {f"dsv4nb.bench.{name}": [name] for name in ("decode", "overhead", "reuse", "spec")}
PUBLIC |= {"dsv4nb.testing.fake_model": ["fake_model"], "dsv4nb.testing.tiny_tokenizer": ["write_tiny_tokenizer"]}
KERNELS = "07_kernels"

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def printed(notebook: nbformat.NotebookNode) -> str:
    """Everything a reader of the executed notebook sees as text, tables and pictures included."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(
        output.text if output.output_type == "stream" else _shown(output.get("data", {})) for output in outputs
    )


def _shown(data: dict[str, str]) -> str:
    text = data.get("text/plain", "")
    if not text.endswith(".HTML object>"):
        return text
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", data["text/html"])).split())


def cpu_seconds() -> float:
    """What the kernels of the notebooks that have ended took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def parsed(source: str) -> ast.AST:
    """The Python of a cell, without magics; it may await."""
    python = "" if source.startswith("%%") else "\n".join(x for x in source.splitlines() if not x.startswith("%"))
    tree = compile(python, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.AST)
    return tree


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
        for node in ast.walk(parsed(cell.source)):
            assert not isinstance(node, ast.ClassDef), "a notebook defines no classes"
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("dsv4nb_kernels"):
                assert path.stem == KERNELS and not any(name.name.startswith("_") for name in node.names)
            elif module.startswith("dsv4nb"):
                assert {name.name for name in node.names} <= set(PUBLIC.get(module, ()))
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_"), node.attr


@each
def test_every_code_cell_is_introduced(path: Path) -> None:
    cells = read(path).cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    runs = re.findall(r"c+", "".join(cell.cell_type[0] for cell in cells))
    assert max(map(len, runs)) <= 2, "text between the cells"


@each
def test_names_notebooks_that_there_are(path: Path) -> None:
    named = re.findall(r"\w+\.ipynb", "".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown"))
    assert set(named) <= {notebook.name for notebook in NOTEBOOKS}


def test_every_notebook_is_run() -> None:
    assert set(EXPECTED) == {path.stem for path in NOTEBOOKS}


def test_the_numbers_of_the_kernels_are_the_measured_ones() -> None:
    """Times that the notebook quotes stand in the table of the kernels."""
    source = "".join(cell.source for cell in read(ROOT / f"notebooks/{KERNELS}.ipynb").cells)
    table = (ROOT / "kernels/README.md").read_text(encoding="utf-8")
    quoted = re.findall(r'^    \("(\w+), (.+)", .*, ([\d.]+), ([\d.]+)\),$', source, re.MULTILINE)
    assert len(quoted) == 5
    for op, matrix, *times in quoted:
        for rows, us in zip((1, 6), times, strict=True):
            assert f"| {op} | {matrix} | {rows} | {us} |" in table, (op, matrix, rows)


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
    before = cpu_seconds()
    client.execute()
    assert cpu_seconds() - before < CPU_SECONDS
    text = printed(notebook)
    for part in EXPECTED[path.stem]:
        assert part in text
    drawn = re.findall(r"^seed (\d): (.*)$", text, re.MULTILINE)
    assert len(set(drawn)) == len({seed for seed, _ in drawn}), "one seed, one reply"
