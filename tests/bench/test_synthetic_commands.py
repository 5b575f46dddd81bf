"""The measurements on random weights, as they are called."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4nb.bench import loading, synthetic_gil
from dsv4nb.bench.commands import main
from dsv4nb.bench.rounds import DRAFTED, GIVEN
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.errors import EngineError
from dsv4nb.weights.synthetic import main as write

pytestmark = pytest.mark.twins

SMALL = [
    *("--layers", "3", "--experts", "12", "--seconds", "0"),
    *("--set", "compress_ratios=[0,4,128]", "--set", "num_hash_layers=1", "--set", "index_n_heads=4"),
    *("--set", "index_topk=32", "--set", "o_lora_rank=64", "--set", "q_lora_rank=256", "--set", "sliding_window=32"),
]


# the tiles of a chunk's kernels are larger
CHUNKED = [
    *("--set", "num_attention_heads=32", "--set", "o_groups=16", "--set", "o_lora_rank=128"),
    *("--set", "index_topk=64", "--set", "sliding_window=64"),
]
TAPS: dict[str, list[str]] = {"tiny": [], "tiny-0731": ["--set", "compress_ratios=[0,4,128,0,0,0]"]}


def both(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str], shape: str = "tiny"
) -> tuple[str, dict[str, Any]]:
    """Run a command that prints its table and writes its JSON."""
    file = folder / "told.json"
    assert main([arguments[0], "--synthetic", shape, *SMALL, *arguments[1:], "--json", str(file)]) == 0
    return capsys.readouterr().out, json.loads(file.read_text())


def columns(text: str, first: str) -> list[list[str]]:
    """Return the lines of a table under the heading that begins with `first`."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.split()[:1] == [first])
    return [line.split() for line in lines[start + 1 : lines.index("", start) if "" in lines[start:] else None]]


def agrees(rows: list[list[str]], arms: list[dict[str, Any]]) -> None:
    """Compare lines of forwards with the arms of the JSON."""
    assert len(rows) == len(arms)
    for row, arm in zip(rows, arms, strict=True):
        assert row[:3] == [str(arm["context"]), str(arm["width"]), str(arm["wall_ms"]["samples"])]
        assert row[3:5] == [f"{arm['wall_ms'][name]:.3f}" for name in ("median", "p95")]
        assert row[-4:] == [f"{arm['experts']:.2f}", f"{arm['read_bytes'] / 1e9:.3f}", "-", "-"]
        assert row[6:8] == ["-", "-"] and arm["device_ms"] is None and arm["copy_share"] is None


def test_decode(twins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["decode", "--context", "40", "300", "--widths", "1", "3", "--routes", "measured"]
    text, told = both(asked, tmp_path, capsys)
    assert "3 of 7 were run; no number here is scaled up to 7" in text
    assert "not measured: no GPU" in text and "off, launched kernel by kernel" in text
    agrees(columns(text, "context"), told["arms"])
    assert [(arm["context"], arm["width"]) for arm in told["arms"]] == [(40, 1), (40, 3), (300, 1), (300, 3)]
    for context in ("40", "300"):
        one, three = (arm for arm in told["arms"] if str(arm["context"]) == context)
        assert told["plain_tok_s"][context] == 1e3 / one["wall_ms"]["median"]
        assert told["widest_by_one"][context] == three["wall_ms"]["median"] / one["wall_ms"]["median"]
        assert told["read_bytes_per_token"][context] == one["read_bytes"]
        assert f"{told['plain_tok_s'][context]:.1f} tok/s plain, {one['read_bytes']:,} bytes of weights a token" in text
        assert f"T(3)/T(1) {told['widest_by_one'][context]:.3f}" in text
    assert [(table["context"], table["width"]) for table in told["kernels"]] == [(40, 1), (40, 3)]
    for table in told["kernels"]:
        assert sum(line["us"] for line in table["lines"]) == pytest.approx(table["step_us"])
        assert f"{table['step_us']:.1f}" in text


@pytest.mark.parametrize("shape", ["tiny", "tiny-0731"])
def test_rounds(twins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str) -> None:
    asked = ["rounds", "--context", "40", "--widths", "1", "4", *TAPS[shape]]
    text, told = both(asked, tmp_path, capsys, shape)
    agrees(columns(text, "context"), told["arms"])
    one, four = (arm["wall_ms"]["median"] for arm in told["arms"])
    draft = 0.0
    if shape == "tiny":
        assert told["drafts"] == GIVEN.format(why="the shape has no drafter") and told["draft_ms"] == {}
    else:
        assert told["drafts"] == DRAFTED
        draft = told["draft_ms"]["40"]["median"]
        assert f"a block of drafts {draft:.3f} ms" in text
    assert told["drafts"] in text
    assert told["rounds_s"]["40"] == {"1": 1e3 / (one + draft), "4": 1e3 / (four + draft)}
    assert told["breaks_even"]["40"] == {"1": (one + draft) / one, "4": (four + draft) / one}
    told_so = f"T 4: {told['rounds_s']['40']['4']:.1f} rounds/s, worth it from {told['breaks_even']['40']['4']:.3f}"
    assert told_so in text


def test_layers_on_one_gpu_after_the_other_are_told_and_read_as_much_as_on_one(
    twins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["decode", "--context", "40", "--widths", "1", "--routes", "measured"]
    _, one = both(asked, tmp_path, capsys)
    text, told = both([*asked, "--devices", "0,1", "--placement", "pipeline"], tmp_path, capsys)
    assert told["ran"]["shared"] == "pipeline: 2, 1 layers, one after the other"
    assert f"placement   {told['ran']['shared']}" in text
    assert told["read_bytes_per_token"] == one["read_bytes_per_token"]
    assert told["arms"][0]["experts"] == one["arms"][0]["experts"]
    assert len(told["ran"]["resident_bytes"]) == 2
    assert sum(told["ran"]["resident_bytes"]) == one["ran"]["resident_bytes"][0]


def test_rounds_on_two_gpus_are_drafted_on_the_first(
    twins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["rounds", "--context", "40", "--widths", "1", "--devices", "0,1", *TAPS["tiny-0731"]]
    text, told = both(asked, tmp_path, capsys, "tiny-0731")
    assert told["ran"]["devices"] == ["cpu", "cpu"] and told["drafts"] == DRAFTED
    assert f"a block of drafts {told['draft_ms']['40']['median']:.3f} ms" in text
    first, second = told["ran"]["resident_bytes"]
    assert first > second


@pytest.mark.parametrize("form", ["exact", "fast", "none"])
def test_prefill(twins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    rows, sizes = 64, CHUNKED if form == "fast" else []
    asked = ["prefill", "--context", "0", "100", "--rows", "64", "--chunk", "32", *sizes]
    text, told = both([*asked, *(["--form", "exact"] if form == "exact" else [])], tmp_path, capsys)
    assert told["form"] == ("fast" if form == "fast" else "exact")
    assert bool(told["fault"]) == (form == "none") and told["fault"] in text
    assert ("fast, in chunks of 32 rows" if form == "fast" else "exact, eight rows at a time") in text
    lines = columns(text, "behind")
    for row, arm in zip(lines, told["arms"], strict=True):
        times = arm["wall_ms"]
        assert row == [
            str(arm["context"]), str(rows), str(times["samples"]), f"{times['median']:.3f}", f"{times['p95']:.3f}",
            f"{arm['tok_s']:.1f}",
        ]  # fmt: skip
        assert arm["tok_s"] == 1e3 * rows / times["median"]
    assert [row[0] for row in lines] == ["0", "100"]


def test_two_gpus_read_prompts_in_chunks(twins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["prefill", "--context", "0", "--rows", "64", "--chunk", "32", "--devices", "0,1", *CHUNKED]
    text, told = both([*asked, "--set", "num_attention_heads=64"], tmp_path, capsys)
    assert (told["form"], told["fault"]) == ("fast", "")
    assert told["ran"]["devices"] == ["cpu", "cpu"]
    assert "fast, in chunks of 32 rows" in text


def test_two_gpus_read_half_of_the_large_matrices_each(
    twins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["decode", "--context", "40", "--widths", "1", "--routes", "measured"]
    _, one = both(asked, tmp_path, capsys)
    _, two = both([*asked, "--devices", "0,1"], tmp_path, capsys)
    assert two["ran"]["devices"] == ["cpu", "cpu"] and len(two["ran"]["resident_bytes"]) == 2
    assert two["arms"][0]["experts"] == one["arms"][0]["experts"] == 2
    assert 0.4 < two["arms"][0]["read_bytes"] / one["arms"][0]["read_bytes"] < 0.9


def test_load(twins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, told = both(["load"], tmp_path, capsys)
    assert f"{told['tensors']:,} tensors, {told['stored_bytes']:,} bytes" in text
    assert told["ran"]["resident_bytes"][0] > 0.9 * told["stored_bytes"] > 0
    assert told["peak_device_bytes"] == [] and told["gb_s"] > 0


def test_load_of_files(twins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["tiny-0731", "--layers", "2", "--experts", "20", "--set", "index_topk=32"]
    assert write([*shape, "--to", str(tmp_path)]) == 0
    capsys.readouterr()
    file = tmp_path / "told.json"
    assert main(["load", "--files", str(tmp_path), "--devices", "0,1", "--runs", "2", "--json", str(file)]) == 0
    text, told = capsys.readouterr().out, json.loads(file.read_text())
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert told["file_bytes"] == stored > told["loaded_bytes"] > 0.9 * stored
    assert told["share"] == told["load"]["median"] / told["read"]["median"] > 0
    assert told["shards"] == len(list(tmp_path.glob("*.safetensors"))) and told["tensors"] > 500
    assert told["high_water"] >= told["anon_peak"] > told["anon_before"] / 2 > 0
    assert f"{told['tensors']:,} tensors, {told['loaded_bytes']:,} bytes" in text and f"{stored:,} bytes" in text
    assert main(["load", "--files", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err


def test_json_alone_takes_the_place_of_the_table(twins: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "--synthetic", "tiny", *SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ran"]["layers"] == 3


@pytest.mark.parametrize("command", ["decode", "rounds", "prefill", "load"])
def test_a_device_that_is_missing_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(torch.cuda.device_count())
    assert main([command, "--synthetic", "flash-0731", "--devices", missing]) == 1
    said = capsys.readouterr()
    assert f"devices is {missing}" in said.err and len(said.err.splitlines()) == 1 and not said.out
    assert main([command, "--synthetic", "flash-0731", "--devices", "cpu"]) == 1
    assert "random weights are measured on GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["rounds"],
        ["load", "--synthetic", "huge"],
        ["load", "--synthetic", "tiny", "--files", "here"],
        ["rounds", "--files", "here"],
        ["decode", "--synthetic", "tiny", "--set", "index_topk"],
        ["decode", "--synthetic", "tiny", "--routes", "none"],
        ["prefill", "--synthetic", "tiny", "--rows", "0"],
    ],
    ids=str,
)
def test_a_bad_command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2 and "usage" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_one_line(
    twins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", "--synthetic", "tiny", *SMALL, "--json", str(tmp_path / "no folder" / "told.json")]) == 1
    said = capsys.readouterr()
    assert "No such file" in said.err and "tensors" in said.out  # what was measured is not lost


def test_memory_that_runs_out_is_one_line(
    twins: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(asked: object) -> None:
        raise MemoryError("CUDA out of memory. Tried to allocate 7 GiB\nand more lines")

    monkeypatch.setattr(loading, "loading", full)
    assert main(["load", "--synthetic", "tiny"]) == 1
    assert capsys.readouterr().err == "memory ran out: CUDA out of memory. Tried to allocate 7 GiB\n"


def test_j09_what_a_busy_cell_costs_an_engine(
    twins: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(synthetic_gil, "INTERVALS_S", (5e-3, 1e-4))
    monkeypatch.setattr(synthetic_gil, "LIMIT_S", 0.3)
    before = sys.getswitchinterval(), threading.active_count()
    text, told = both(["gil", "--context", "40", "--widths", "1", "3", "--new", "8", "--runs", "1"], tmp_path, capsys)
    assert (sys.getswitchinterval(), threading.active_count()) == before
    assert (told["context"], told["runs"], told["forwards"]) == (40, 1, 8)
    assert list(told["arms"]) == ["1 row a forward", "3 rows a forward"]
    rows = columns(text, "engine")
    for row, (name, interval) in zip(
        rows, ((name, interval) for name, intervals in told["arms"].items() for interval in intervals), strict=True
    ):
        idle, busy, cell = told["arms"][name][interval]
        assert row[:4] == name.split() and row[4:6] == interval.split()
        assert row[6:] == [f"{idle:.1f}", f"{busy:.1f}", f"{busy / idle:.0%}", f"{cell:.0%}"]
        assert min(idle, busy, cell) > 0


def test_j09_an_engine_that_fails_beside_a_cell_is_told(
    twins: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> None:
        raise EngineError("cuda:0 and cuda:1 lost each other")

    monkeypatch.setattr(DeviceEngine, "draw_rows", fail)
    assert main(["gil", "--synthetic", "tiny", *SMALL, "--new", "8"]) == 1
    assert capsys.readouterr().err == "cuda:0 and cuda:1 lost each other\n"


@pytest.mark.gpu
def test_j09_most_of_the_speed_is_kept_beside_a_busy_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["gil", "--synthetic", "flash-0731", "--experts", "32", "--new", "192"]  # as many kernels as a step has
    assert main([*asked, "--json", str(tmp_path / "told.json")]) == 0
    print(capsys.readouterr().out)
    idle, busy, _ = json.loads((tmp_path / "told.json").read_text())["arms"]["1 row a forward"]["0.1 ms"]
    assert busy / idle >= 0.7


@pytest.mark.gpu
def test_decode_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, told = both(["decode", "--context", "40", "--widths", "1", "6"], tmp_path, capsys)
    assert told["ran"]["copy_tb_s"] > 0 and told["ran"]["graphs"] and told["clocks"]
    for arm in told["arms"]:
        assert 0 < arm["device_ms"]["median"] <= arm["device_ms"]["p95"]
        assert 0 < arm["copy_share"] < 1
    for table in told["kernels"]:
        assert sum(line["us"] for line in table["lines"]) == pytest.approx(table["step_us"])
        assert any("expert_up" in line["name"] for line in table["lines"])
    assert "kernels of a forward of 6 at 40" in text


@pytest.mark.parametrize("shape", TAPS)
def test_the_whole_tells_each_line_as_it_comes(
    twins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    for name, value in {"SAMPLES": 2, "CHAINED": 3, "ROUNDS": 2, "PROMPTS": (20, 9), "PROMPT_TURNS": 1}.items():
        monkeypatch.setattr(f"dsv4nb.bench.whole.{name}", value)
    file = tmp_path / "told.json"
    asked = ["whole", "--synthetic", shape, *SMALL, *TAPS[shape], "--devices", "0,1", "--widths", "1", "3"]
    assert main([*asked, "--context", "40", "70", "--json", str(file)]) == 0
    said, told = capsys.readouterr(), json.loads(file.read_text())
    names = [line["name"] for line in told["lines"]]
    assert all(name in said.err and name in said.out for name in names)
    assert all(line["value"] > 0 for line in told["lines"])
    drafted = ["a block of drafts", "rounds, free routes, drafts included", "rounds, routes of a text, drafts included"]
    assert [name for name in drafted if name in names] == (drafted if shape == "tiny-0731" else [])
    assert {"plain at 40, each of the one before", "rows of 3, routes of a text", "prompt of 20"} <= set(names)
    for chained in names[1], "rounds, free routes, drafts included":
        assert (f"{chained}, none begun ahead" in names) == (chained in names)
    assert {"plain at 70, tokens given", "T(70) / T(40), one row"} <= set(names)
