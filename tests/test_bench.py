from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import dsv4nb
from dsv4nb.bench.commands import main
from dsv4nb.bench.decode import Report
from dsv4nb.bench.spread import Spread

TOY = Path(dsv4nb.__file__).parent / "toy" / "model"


def test_a_spread_has_a_middle_and_ends() -> None:
    assert str(Spread.of([3.0, 1.0, 2.0])) == "2 (1 to 3)"


@pytest.mark.parametrize("arguments", [[], ["decode", "--new", "1"], ["decode", "--runs", "x"], ["prefill"]], ids=str)
def test_a_bad_command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_folder_without_a_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", "--model", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "config.json" in said.err and len(said.err.splitlines()) == 1 and not said.out


@pytest.mark.skipif(not (TOY / "config.json").is_file(), reason="the bundled model is not built")
class TestToy:
    def test_numbers_for_programs(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["decode", "--new", "4", "--runs", "2", "--prompt-tokens", "7", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["model"], told["prompt_tokens"], told["new_tokens"], told["runs"]) == ("toy", 7, 4, 2)
        assert 0 < told["first_token_s"]["low"] <= told["first_token_s"]["median"] <= told["first_token_s"]["high"]
        assert told["decode_tok_s"]["median"] > 0 and told["peak_rss_mb"] > 50 and 0 < told["import_s"] < 5

    def test_speculation_against_the_plain_route(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["spec", "--new", "8", "--runs", "1", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert 1 < told["tokens_per_round"] <= 6 and told["spec_tok_s"]["median"] > 0 and len(told["verify_ms"]) == 6
        assert main(["spec", "--new", "8", "--runs", "1", "--temperature", "1"]) == 0
        assert "speculated" in capsys.readouterr().out


def test_a_table_for_people() -> None:
    report = Report(
        model="toy",
        device="CPU",
        prompt_tokens=100,
        new_tokens=64,
        runs=3,
        import_s=0.05,
        load_s=1.7,
        first_token_s=Spread.of([0.1, 0.2]),
        decode_tok_s=Spread.of([50.0, 60.0]),
        peak_rss_mb=None,
        threads=1,
        torch="2.13.0",
    )
    assert str(report).splitlines() == [
        "model         toy on CPU",
        "asked         100 prompt tokens, 64 tokens, 3 runs",
        "import        0.050 s",
        "load          1.70 s",
        "first token   0.15 (0.1 to 0.2) s",
        "decode        55 (50 to 60) tok/s, plain",
        "peak memory   unknown",
        "threads       1",
        "torch         2.13.0",
    ]


def test_the_cost_above_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overhead", "--vocab", "2048", "--new", "16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["vocab_size"], told["new_tokens"]) == (2048, 16)
    assert "greedy" in told["arms"] and all(0 < median <= high for median, high in told["arms"].values())
    assert main(["overhead", "--vocab", "2048", "--new", "16"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "ms per token above the engine, V = 2,048, 16 tokens per arm"
    assert len(said) == 2 + len(told["arms"])


def test_what_a_busy_cell_costs(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.getswitchinterval()
    assert main(["gil", "--new", "8", "--runs", "1", "--wait-only"]) == 0
    said = capsys.readouterr().out
    assert "one wait of 4 ms" in said and "toy" not in said and said.count("0.1 ms") == 1
    # kept in whole microseconds, rounded down: another test's thread may have left one that is none exactly
    assert sys.getswitchinterval() == pytest.approx(before, abs=1.5e-6)


def test_what_reuse_is_worth(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reuse", "--prompt-tokens", "200", "--runs", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["order"] == ["on", "off"]
    for move in ("next turn, live", "another try, anchors", "fork, live", "edit, anchors"):
        on, off = told["arms"][f"{move} on"], told["arms"][f"{move} off"]
        assert on["computed"][0] < 32 < 180 < off["computed"][0]
    rows = {name: (arm["computed"][0], arm["new"][0], arm["copied_bytes"][0]) for name, arm in told["arms"].items()}
    assert all(computed <= new + 8 for name, (computed, new, _) in rows.items() if name.endswith("on")), rows
    assert rows["another try, anchors on"][:2] == (8, 0) and "edit 3 of 20, anchors on" in rows
    assert all((copied > 0) == name.endswith("on") for name, (*_, copied) in rows.items()), rows
