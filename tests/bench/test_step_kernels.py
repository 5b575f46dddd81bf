"""Kernels of a forward, by what launched them: the arithmetic, and what operations are told to read."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4nb.bench import step_kernels
from dsv4nb.bench.asked import Asked
from dsv4nb.bench.commands import main
from dsv4nb.bench.launches import KERNELS, OTHERS, Call, calls, timed
from dsv4nb.bench.rig import launching, rig
from dsv4nb.bench.spread import Times
from dsv4nb.bench.step_kernels import BY_EVENTS, BY_PROFILER, NAME, SHOWN, Step, operations, summed, uses
from dsv4nb.weights.store import tensors_of
from dsv4nb_kernels._kv_records import record_bytes

pytestmark = pytest.mark.twins

ROWS, UP, DOWN = "_fp8_rows_kernel", "_expert_up_kernel", "_expert_down_kernel"
SMALL: dict[str, Any] = {
    "compress_ratios": [0, 4, 128],
    "num_hash_layers": 1,
    "index_n_heads": 4,
    "index_topk": 32,
    "o_lora_rank": 64,
    "q_lora_rank": 256,
    "sliding_window": 32,
}
ASKED = Asked(shape="tiny", layers=3, experts=12, changes=SMALL, contexts=(300,), widths=(2,))


def call(operation: str, use: str = "", nbytes: int | None = None) -> Call:
    return Call(device=0, operation=operation, use=use, nbytes=nbytes)


NOTED = [call("fp8_rows", "down", 100), call("fp8_rows", "out", 300), call("expert_up", "", 4000)]


def test_overlaps_count_once_gaps_are_told_and_all_adds_up_to_the_step() -> None:
    first = [
        (ROWS, 10.0, 20.0),
        (ROWS, 15.0, 30.0),  # begins while the one ahead runs
        ("copy", 22.0, 25.0),  # on another stream, all of it beside the one ahead
        (UP, 34.0, 44.0),
    ]
    second = [(UP, 134.0, 142.0), (ROWS, 110.0, 120.0), (ROWS, 120.0, 130.0), ("copy", 130.0, 131.0)]
    lines, idle = summed([first, second], NOTED, copy_tb_s=2.0)
    found = {(line.name, line.use): (line.calls, line.own_us, line.us, line.nbytes) for line in lines}
    assert found == {
        (ROWS, "down"): (1, 10, 10, 100),
        (ROWS, "out"): (1, 12.5, 10, 300),
        ("copy", ""): (1, 2, 0.5, None),
        (UP, ""): (1, 9, 9, 4000),
    }
    assert idle == (4 + 3) / 2
    assert sum(line.us for line in lines) + idle == ((44 - 10) + (142 - 110)) / 2
    assert [line.us for line in lines] == sorted((line.us for line in lines), reverse=True)
    share = next(line.copy_share for line in lines if line.name == UP)
    assert share == pytest.approx(4000 / 9e-6 / 2e12)
    assert next(line.copy_share for line in lines if line.name == "copy") is None
    assert all(line.copy_share is None for line in summed([first], NOTED, copy_tb_s=None)[0])


def test_a_kernel_that_ends_inside_another_takes_nothing_of_the_step() -> None:
    lines, idle = summed([[("long", 0.0, 10.0), ("short", 2.0, 3.0)]], [], copy_tb_s=None)
    assert [(line.name, line.own_us, line.us) for line in lines] == [("long", 10, 10), ("short", 1, 0)]
    assert idle == 0


def test_kernels_are_told_apart_by_their_order() -> None:
    assert uses([ROWS, "copy", ROWS, UP], NOTED) == ["down", "", "out", ""]
    twice = [call("top_entries", "a"), call("top_entries", "b")]
    assert uses(["_top_entries_kernel"] * 6, twice) == ["a"] * 3 + ["b"] * 3  # three rounds of each
    assert uses([ROWS] * 3, NOTED) == [""] * 3  # of another step than was noted
    assert uses([ROWS], []) == [""]


def test_only_the_kernel_that_reads_has_the_bytes() -> None:
    noted = [call("hyper_mix", "ahead of experts", 500), call("hyper_mix", "ahead of experts", 700)]
    spans = [("_expand_kernel", 0.0, 1.0), ("_collapse_kernel", 1.0, 2.0)]
    spans += [(name, begin + 2, end + 2) for name, begin, end in spans]
    lines, _ = summed([spans], noted, copy_tb_s=1.0)
    assert {(line.name, line.use): line.nbytes for line in lines} == {
        ("_expand_kernel", "ahead of experts"): 1200,
        ("_collapse_kernel", "ahead of experts"): None,
    }


def test_the_table_shows_what_adds_up() -> None:
    spans = [[(f"op {i}", 2.0 * i, 2.0 * i + 1.0 + i % 2) for i in range(SHOWN + 5)]]
    lines, idle = summed(spans, [], copy_tb_s=None)
    step_us = sum(line.us for line in lines) + idle
    wall = Times.of([0.2])
    step = Step(
        context=7, width=1, device="GPU 1", lines=lines, idle_us=idle, step_us=step_us, gpu_ms=None, wall_ms=wall
    )
    text = str(step).splitlines()
    assert text[0].split() == ["GPU", "1,", "1", "row", "at", "7", "calls", "own", "us", "us", "MB", "copy"]
    shown, rest, (total, overlap, nothing, whole, alone) = text[1 : SHOWN + 1], text[SHOWN + 1], text[SHOWN + 2 :]
    assert rest.split()[:2] == ["5", "others"]
    taken = [float(line[NAME:].split()[2]) for line in (*shown, rest)]
    assert sum(taken) == pytest.approx(float(total.split()[4]), abs=0.1)
    assert sum(taken) + float(nothing.split()[-1]) == pytest.approx(float(whole.split()[-1]), abs=0.1)
    assert float(overlap.split()[-1]) == step.overlap_us == 0
    assert "- us on the GPU's clock, 200.0 us from the call" in alone


def test_every_kernel_that_is_told_apart_exists() -> None:
    places = {"norm_rope_rows": "norm_rope_write", "norm_rope_heads": "norm_rope_write", "round_rows": "_rounded_rows"}
    own = {"_round_kernel": "_expert_rows"}
    own |= dict.fromkeys(("_sources_kernel", "_pools_kernel"), "_compress_both")
    for name, operation in KERNELS.items():
        module = own.get(name) or places.get(operation, operation)
        assert hasattr(import_module(f"dsv4nb_kernels.{module}"), name), name
    assert set(OTHERS) < set(KERNELS)


def test_operations_say_what_they_are_for_and_read(twins: None) -> None:
    with rig(ASKED, counts=False) as made, launching(made) as other:
        other.forward(300, 2)
        found = calls(partial(other.forward, 300, 2))
        weights = made._ranks[0]
    by_use = {(one.operation, one.use): one.nbytes for one in found}
    window, sparse, dense = weights.layers

    def stored(*held: object) -> int:
        return sum(tensor.nbytes for tensor in tensors_of(held))

    assert [one.operation for one in found].count("route") == 3
    assert by_use["fp8_rows", "groups"] == stored(dense.attention.groups)
    assert by_use["bf16_rows", "logits"] == stored(weights.head)
    assert by_use["hyper_mix", "ahead of the head"] == stored(weights.hyper_head)
    assert by_use["bf16_rows", "ratio 4, entries and index"] == stored(sparse.attention.sources)
    assert by_use["bf16_rows", "ratio 128, entries"] == stored(dense.attention.sources)
    assert ("compress", "ratio 4, entries and index") in by_use and by_use["route", ""] is None
    row, key = record_bytes(128, 64), 128 * 2
    assert by_use["sparse_attention", "window alone"] == (32 + 1) * row  # of two rows, each with 32 positions
    assert by_use["sparse_attention", "ratio 128"] == (32 + 1 + 302 // 128) * row
    assert by_use["index_scores", ""] == 302 // 4 * key
    up = window.experts.up
    assert by_use["expert_up", ""] in [stored(up.shared) + n * up.routed[0].nbytes for n in (2, 3, 4)]


def test_operations_of_a_pair(twins: None) -> None:
    asked = Asked(shape="tiny", devices="0,1", layers=3, experts=12, changes=SMALL, contexts=(300,), widths=(1,))
    with rig(asked, counts=False) as made, launching(made) as other:
        found = calls(partial(other.forward, 300, 1))
    assert [one.operation for one in found].count("hyper_mix") == 2 * 7


def test_operations_are_timed_from_one_to_the_next_on_each_gpu(twins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """A clock that goes on by a millisecond with every record."""

        now = 0.0

        def __init__(self, **_: object) -> None:
            self.at = -1.0

        def record(self, *_: object) -> None:
            Event.now += 1.0
            self.at = Event.now

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    asleep: list[int] = []
    for name, fake in (
        ("Event", Event),
        ("device", lambda device: nullcontext()),
        ("current_stream", lambda device: None),
        ("synchronize", lambda: None),
        ("_sleep", asleep.append),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    with rig(ASKED, counts=False) as made, launching(made) as other:
        forward = partial(other.forward, 300, 2)
        noted = calls(forward)
        taken = timed(made.devices, forward, 123)
    assert asleep == [123] and Event.now == len(noted) + 1  # and the end
    assert taken == (1e3,) * len(noted)
    lines = operations(noted, taken, 0, 2.0)
    assert sum(line.us for line in lines) == sum(taken)
    groups = next(line for line in lines if line.use == "groups")
    assert (groups.name, groups.calls, groups.us) == ("fp8_rows", 3, 3e3)
    assert groups.copy_share == pytest.approx((groups.nbytes or 0) / 3e-3 / 2e12)
    assert operations(noted, taken, 1, 2.0) == ()


@pytest.mark.parametrize("devices", ["0", "0,1"])
def test_the_command(twins: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], devices: str) -> None:
    file = tmp_path / "told.json"
    changes = [text for name, value in SMALL.items() for text in ("--set", f"{name}={json.dumps(value)}")]
    asked = ["kernels", "--synthetic", "tiny", "--layers", "3", "--experts", "12", *changes, "--devices", devices]
    assert main([*asked, "--context", "40", "300", "--widths", "1", "--json", str(file)]) == 0
    text, told = capsys.readouterr().out, json.loads(file.read_text())
    assert told["way"] == BY_PROFILER and BY_PROFILER in text
    assert [step["context"] for step in told["steps"]] == [c for c in (40, 300) for _ in devices.split(",")]
    for step in told["steps"]:
        assert sum(line["us"] for line in step["lines"]) + step["idle_us"] == pytest.approx(step["step_us"])
        assert f"{step['step_us']:.1f}" in text and step["gpu_ms"] is None
        assert f"{1e3 * step['wall_ms']['median']:.1f} us from the call to the tokens" in text


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--devices", "cpu"], "random weights are measured on GPUs"),
        (["--devices", "99"], "devices is 99"),
    ],
)
def test_a_device_that_is_none_is_one_line(asked: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--synthetic", "flash-0731", *asked]) == 1
    said = capsys.readouterr()
    assert told in said.err and len(said.err.splitlines()) == 1 and not said.out


@pytest.mark.gpu
@pytest.mark.parametrize("is_seen", [True, False])
def test_kernels_of_a_gpu_are_told_apart(is_seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_seen:
        monkeypatch.setattr("dsv4nb.bench.kernels.spans", lambda devices, *rest: [[[] for _ in devices]])
    report = step_kernels.step_kernels(Asked(shape="flash", layers=4, experts=32, contexts=(4096,), widths=(1, 6)))
    assert report.way == (BY_PROFILER if is_seen else BY_EVENTS)
    for step in report.steps:
        by_use = {(KERNELS.get(line.name, line.name), line.use): line for line in step.lines}
        for key, count in ((("fp8_rows", "query"), 4), (("sparse_attention", "ratio 128"), 1), (("expert_up", ""), 4)):
            assert by_use[key].calls == count
        up = by_use["expert_up", ""]
        assert up.nbytes is not None and up.copy_share is not None and 0.1 < up.copy_share < 1.3
        assert step.gpu_ms is not None
        if is_seen:
            assert 0.5 < step.step_us / (1e3 * step.gpu_ms.median) < 2
