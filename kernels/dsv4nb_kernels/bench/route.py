"""The router of V4-Flash, alone and behind its gate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4nb_kernels import bf16_rows, route
from dsv4nb_kernels.bench._driver import Arm, Launch, random_words, require_close
from dsv4nb_kernels.reference.route import route as twin

OP = "route"
EXPERTS, HIDDEN, CHOICES, FACTOR = 256, 4096, 6, 1.5
VOCABULARY = 129280
SPLITS = bf16_rows.tuning(EXPERTS, HIDDEN).splits
SHAPES = ("scores", "table", "gate, scores")
ROWS = (1, 2, 4, 6)
FEW = 64  # copies: the logits have just been written when they are read
LIMIT = 1e-6


def arms(device: torch.device) -> list[Arm]:
    """Return the product on every shape and T; one launch after the other ends, too."""
    return [arm for shape in SHAPES for rows in ROWS for arm in _own(device, shape, rows)]


def _own(device: torch.device, shape: str, rows: int) -> Iterator[Arm]:
    gate_bytes = EXPERTS * HIDDEN * 2 if shape.startswith("gate") else 0
    for dependent in (True, False):
        yield Arm(
            op=OP,
            shape=shape,
            rows=rows,
            name="dependent" if dependent else "not dependent",
            bytes_read=SPLITS * rows * EXPERTS * 4 + gate_bytes,
            make=partial(_make, device, shape, rows, dependent),
            compile=partial(_compile, shape, dependent),
            check=partial(_check, device, shape, rows),
            is_product=dependent,
            copies=None if gate_bytes else FEW,
        )


def _compile(shape: str, dependent: bool) -> None:
    f32, i32 = torch.float32, torch.int32
    hashed = shape == "table"
    route._route_kernel.warmup(
        f32, i32 if hashed else f32, i32, i32, i32, f32, FACTOR, grid=(1,), num_warps=route.WARPS, launch_pdl=dependent,
        **route.constants(EXPERTS, CHOICES, SPLITS, hashed, dependent),
    )  # fmt: skip


def _step(device: torch.device, shape: str, rows: int, count: int) -> tuple[Tensor, dict[str, Any]]:
    generator = torch.Generator(device).manual_seed(rows)
    logits = torch.randn(count, SPLITS, rows, EXPERTS, generator=generator, device=device)
    if shape == "table":
        table = torch.rand(VOCABULARY, EXPERTS, generator=generator, device=device).topk(CHOICES).indices
        tokens = torch.randint(VOCABULARY, (rows,), generator=generator, device=device)
        return logits, {"bias": None, "table": table.to(torch.int32), "tokens": tokens.to(torch.int32)}
    bias = torch.randn(EXPERTS, generator=generator, device=device) * 0.1
    return logits, {"bias": bias, "table": None, "tokens": None}


def _make(device: torch.device, shape: str, rows: int, dependent: bool, count: int) -> Launch:
    logits, chooser = _step(device, shape, rows, 1 if shape.startswith("gate") else count)
    out = (
        torch.empty(rows, CHOICES, dtype=torch.int32, device=device),
        torch.empty(rows, CHOICES, device=device),
    )
    if not shape.startswith("gate"):
        return lambda i: route.route(
            logits[i % count], k=CHOICES, factor=FACTOR, out=out, dependent=dependent, **chooser
        )
    words = random_words(device, count * EXPERTS * HIDDEN // 2, ~0x40004000).view(count, -1)
    gates = [bf16_rows.Bf16Matrix(words=words[i], n=EXPERTS, k=HIDDEN) for i in range(count)]
    x = torch.randn(rows, HIDDEN, device=device).bfloat16()

    def launch(i: int) -> object:
        bf16_rows.bf16_rows(x, gates[i % count], out=logits[0], dependent=dependent)
        return route.route(logits[0], k=CHOICES, factor=FACTOR, out=out, dependent=dependent, **chooser)

    return launch


def _check(device: torch.device, shape: str, rows: int) -> None:
    logits, chooser = _step(device, shape, rows, 1)
    experts, weights = route.route(logits[0], k=CHOICES, factor=FACTOR, **chooser)
    added = logits[0, 0]
    for part in logits[0, 1:]:
        added = added + part
    bias, table, tokens = chooser["bias"], chooser["table"], chooser["tokens"]
    lines = None if table is None or tokens is None else table[tokens.long()].long()
    given = None if bias is None else bias.double()
    chosen, shares = twin(added.double(), bias=given, table=lines, k=CHOICES, factor=FACTOR)
    assert torch.equal(experts.long(), chosen), "other experts than the twin's"
    require_close(weights, shares, LIMIT)
