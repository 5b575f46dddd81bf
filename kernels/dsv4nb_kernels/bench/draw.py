"""The draw over V4-Flash's vocabulary: greedy, plain, filtered, penalised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4nb_kernels import draw
from dsv4nb_kernels._draw_rules import Settings, Stages
from dsv4nb_kernels.bench._driver import Arm, Launch
from dsv4nb_kernels.draw import Drawn, Scratch, Tuning
from dsv4nb_kernels.reference import draw as twin
from dsv4nb_kernels.reference.draw import Rule

OP = "draw"
VOCABULARY = 129280
KINDS = {
    "greedy": Rule(temperature=0.0),
    "race": Rule(),
    "top-p": Rule(top_p=0.95),
    "top-k": Rule(top_k=50),
    "top-k, top-p": Rule(top_k=50, top_p=0.95, min_p=0.01),
    "top-p, flat": Rule(top_p=0.95, temperature=20.0),
    "top-p, penal.": Rule(top_p=0.95, repetition=1.1, frequency=0.1, presence=0.1),
}
ROWS = (1, 2, 4, 6)
SWEPT_ROWS, SWEPT = (1, 6), ("race", "top-p")
CUTS = [Tuning(block=block, warps=warps) for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16))]
FEW = 16  # copies: the logits have just been written when they are read
TYPES = {
    "process": "f32 f64 i32 f64 f32 i64 f32 i64 i64",
    "search": "f32 i64 f64 i64 i64 i64 i64",
    "fold": "i64 i64",
    "ties": "f32 i64 f64 i64 i64 i64 i32",
    "race": "f32 i64 f64 i64 i64 i32 i64",
    "finish": "f32 f64 i64 i64 f32 i32 f32",
}
_DTYPES = {"f32": torch.float32, "f64": torch.float64, "i32": torch.int32, "i64": torch.int64}


def arms(device: torch.device) -> list[Arm]:
    """Return the product's cut on every kind of row and T, and other cuts of two kinds at T = 1 and 6."""
    return [arm for kind in KINDS for rows in ROWS for arm in _own(device, kind, rows)]


def _own(device: torch.device, kind: str, rows: int) -> Iterator[Arm]:
    def arm(cut: Tuning, dependent: bool = True) -> Arm:
        return Arm(
            op=OP,
            shape=kind,
            rows=rows,
            name=str(cut) + ("" if dependent else ", not dependent"),
            bytes_read=rows * VOCABULARY * 4,
            make=partial(_make, device, kind, rows, cut, dependent),
            compile=partial(_compile, kind, cut, dependent),
            check=partial(_check, device, kind, rows, cut),
            is_product=cut == draw.TUNING and dependent,
            copies=FEW,
        )

    yield arm(draw.TUNING)
    if rows in SWEPT_ROWS and kind in SWEPT:
        yield arm(draw.TUNING, dependent=False)
        yield from (arm(cut) for cut in CUTS if cut != draw.TUNING)


def _stages(rules: list[Rule]) -> Stages:
    return Stages.of(rules, penalised=rules[0].repetition != 1)


def _compile(kind: str, cut: Tuning, dependent: bool) -> None:
    for name, constants in draw.launches(VOCABULARY, _stages([KINDS[kind]]), cut, dependent):
        types = [_DTYPES[each] for each in TYPES[name].split()]
        if name == "process" and kind != "top-p, penal.":
            types[1:3] = torch.float64, torch.int32  # what stands in for what is not given
        kernel: Any = draw.KERNELS[name]
        kernel.warmup(*types, grid=(1,), **constants, **draw.options(name, cut), launch_pdl=dependent)


def _rules(kind: str, rows: int) -> list[Rule]:
    return [replace(KINDS[kind], seed=7, position=100 + i) for i in range(rows)]


def _counts(device: torch.device, kind: str, rows: int) -> Tensor | None:
    if kind != "top-p, penal.":
        return None
    generator = torch.Generator(device).manual_seed(rows)
    drawn = torch.rand(rows, VOCABULARY, generator=generator, device=device)
    return (drawn < 0.01).to(torch.int32)


def _logits(device: torch.device, rows: int, count: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(rows)
    return torch.randn(count, rows, VOCABULARY, generator=generator, device=device) * 3


def _make(device: torch.device, kind: str, rows: int, cut: Tuning, dependent: bool, count: int) -> Launch:
    rules, logits, counts = _rules(kind, rows), _logits(device, rows, count), _counts(device, kind, rows)
    settings, stages = Settings.of(rules, device), _stages(rules)
    scratch, out = Scratch.empty(rows, VOCABULARY, device, cut), Drawn.empty(rows, device)
    return lambda i: draw.launch(
        logits[i % count], settings, stages, cut, counts=counts, scratch=scratch, out=out, dependent=dependent
    )


def _check(device: torch.device, kind: str, rows: int, cut: Tuning) -> None:
    rules, logits, counts = _rules(kind, rows), _logits(device, rows, 1)[0], _counts(device, kind, rows)
    drawn = draw.launch(logits, Settings.of(rules, device), _stages(rules), cut, counts=counts)
    expected = twin.draw(logits.cpu(), rules, counts=None if counts is None else counts.cpu())
    assert drawn.ids.tolist() == expected.ids.tolist(), "other ids than the twin's"
