"""The steps of a layer of V4-Flash in the prefill of a chunk of 2,048 rows, but the products in FP8 and FP4.

Every step by itself, on one copy of its operands: most are larger than the L2, and what is not has just been written
when its turn comes. Names of problems: 32 or 64 heads for one GPU of a pair and for one alone, and the position of the
first row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import compress, hyper_mix, index_rows, index_scores, norm_rope_write, route, top_entries
from dsv4nb_kernels._chunk_rows import ChunkRows
from dsv4nb_kernels._kv_records import Unpacked, record_bytes, unpack_records
from dsv4nb_kernels._round_chunk import round_chunk
from dsv4nb_kernels.bench._driver import Arm, Launch
from dsv4nb_kernels.bench._records import random_records

OP = "chunk"
ROWS = 2048
HIDDEN, LATENT, WIDTH, TAIL, INDEX_HEADS, INDEX_WIDTH = 4096, 1024, 512, 64, 64, 128
EXPERTS, CHOICES, CHOSEN = 256, 6, 512
EPS, ITERATIONS = 1e-6, 20
CONTEXTS = {"8K": 8192, "64K": 65536}

Step = Callable[[], object]


def arms(device: torch.device) -> list[Arm]:
    """Return every step, and of those that depend on the place in the context one at each."""
    return [
        Arm(
            op=OP,
            shape=name,
            rows=ROWS,
            name=own,
            bytes_read=moved,
            make=partial(_make, step, device),
            check=partial(_check, step, device),
            is_product=own == "product",
            copies=1,
        )
        for name, own, moved, step in _steps()
    ]


def _make(step: Callable[[torch.device], tuple[Step, list[Tensor]]], device: torch.device, count: int) -> Launch:
    launch, _ = step(device)
    return lambda i: launch()


def _check(step: Callable[[torch.device], tuple[Step, list[Tensor]]], device: torch.device) -> None:
    """What a step writes is written everywhere; the tests hold it to the twins."""
    launch, written = step(device)
    for tensor in written:
        tensor.view(torch.uint8).fill_(0xFF)
    launch()
    for tensor in written:
        assert not bool((tensor.view(torch.int16) == -1).all(-1).any()), "rows that were not written"


def _steps() -> Iterator[tuple[str, str, int, Callable[[torch.device], tuple[Step, list[Tensor]]]]]:
    """Name, arm, bytes read and written, and how to make it."""
    row = ROWS * HIDDEN
    yield "hyper_mix", "product", row * 34, _mix
    yield "norm_rope_chunk", "product", ROWS * ((LATENT + WIDTH) * 4 + LATENT * 2 + record_bytes(WIDTH, TAIL)), _low
    for heads in (32, 64):
        yield f"norm_rope_heads, {heads}", "product", ROWS * heads * WIDTH * 6, partial(_heads, heads)
        yield f"round_chunk, {heads} heads", "product", ROWS * heads * WIDTH * 4, partial(_round, heads * WIDTH, False)
    for width in (4096, 8192):
        yield f"round_chunk, {width}", "product", ROWS * width * 6, partial(_round, width, True)
    for ratio, width in ((4, WIDTH), (4, INDEX_WIDTH), (128, WIDTH)):
        line = 2 * width * (2 if ratio == 4 else 1)
        yield f"compress {ratio}, {width}", "product", ROWS * line * 12, partial(_compress, ratio, width)
    yield "index_rows", "product", ROWS * INDEX_HEADS * INDEX_WIDTH * 6, _index
    for name, position in CONTEXTS.items():
        count = -(-(position + ROWS) // 4 // 128) * 128
        moved = (ROWS + 128 + count) * (record_bytes(WIDTH, TAIL) + 2 * WIDTH)
        yield f"unpack_records, {name}", "product", moved, partial(_rows, count)
        moved = ROWS * count * 4
        for stages, rows in ((2, 32), (2, 64), (3, 64), (4, 64), (2, 128), (2, 16)):
            cut = index_scores.Tuning(stages=stages, rows=rows)
            own = "product" if cut == index_scores.CHUNK_TUNING else str(cut)
            yield f"index_scores, {name}", own, moved, partial(_scores, position, count, cut)
        yield f"top_entries, {name}", "product", moved, partial(_top, position, count, top_entries.CHUNK_TUNING)
        for block, last, wide in ((4096, 8192, (8, 16)), (4096, 8192, (4, 8)), (8192, 8192, (8, 8))):
            other = top_entries.Tuning(block=block, last=last, warps=wide)
            yield f"top_entries, {name}", str(other), moved, partial(_top, position, count, other)
    yield "route", "product", ROWS * EXPERTS * 16, _route


def _floats(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(sum(shape)), device=device)


def _turn(device: torch.device) -> tuple[Tensor, Tensor]:
    angle = _floats(device, ROWS, TAIL // 2)
    return angle.cos().repeat_interleave(2, -1), torch.stack((-angle.sin(), angle.sin()), -1).flatten(-2)


def _mix(device: torch.device) -> tuple[Step, list[Tensor]]:
    n = hyper_mix.COEFFICIENTS
    weights = hyper_mix.HyperWeights(
        fn=_floats(device, n, hyper_mix.STREAMS * HIDDEN) * HIDDEN**-0.5,
        scale=torch.ones(n, device=device),
        base=torch.ones(n, device=device),
        norm=torch.ones(HIDDEN, device=device),
    )
    before, out = (hyper_mix.Boundary.empty(ROWS, HIDDEN, device) for _ in range(2))
    before.post.fill_(0.5)
    before.comb.fill_(0.25)
    stream, y = _floats(device, ROWS, hyper_mix.STREAMS, HIDDEN).bfloat16(), _floats(device, 1, ROWS, HIDDEN)
    assert out.arranged is not None
    return lambda: hyper_mix.hyper_mix(
        y, stream, before, weights, iterations=ITERATIONS, hc_eps=EPS, norm_eps=EPS, act_fp8=True, out=out,
        dependent=True,
    ), [out.stream, out.x, out.arranged.values, out.post, out.comb]  # fmt: skip


def _low(device: torch.device) -> tuple[Step, list[Tensor]]:
    product, (cos, sin) = _floats(device, 1, ROWS, LATENT + WIDTH), _turn(device)
    ring = torch.zeros(ROWS + 128, record_bytes(WIDTH, TAIL), dtype=torch.uint8, device=device)
    slots, out = torch.arange(ROWS, dtype=torch.int32, device=device), ChunkRows.empty(ROWS, LATENT, device)
    norms = torch.ones(LATENT, device=device), torch.ones(WIDTH, device=device)
    return lambda: norm_rope_write.norm_rope_chunk(
        product, *norms, cos, sin, slots, ring, eps=EPS, act_fp8=True, kv_fp8=True, out=out, dependent=True
    ), [out.values, ring[:ROWS]]


def _rows(count: int, device: torch.device) -> tuple[Step, list[Tensor]]:
    sizes = ROWS + 128, count
    ring, entries = (
        Unpacked(
            records=random_records(size, WIDTH, TAIL, device),
            rows=torch.empty(size, WIDTH, dtype=torch.bfloat16, device=device),
        )
        for size in sizes
    )
    return lambda: unpack_records(ring, entries, tail=TAIL), [ring.rows, entries.rows]


def _heads(heads: int, device: torch.device) -> tuple[Step, list[Tensor]]:
    product, (cos, sin) = _floats(device, 1, ROWS, heads * WIDTH), _turn(device)
    out = torch.empty(ROWS, heads, WIDTH, dtype=torch.bfloat16, device=device)
    return lambda: norm_rope_write.norm_rope_heads(product, cos, sin, heads=heads, eps=EPS, out=out, dependent=True), [
        out
    ]


def _round(width: int, act_fp8: bool, device: torch.device) -> tuple[Step, list[Tensor]]:
    x = _floats(device, 1, ROWS, width) if act_fp8 else _floats(device, ROWS, width).bfloat16()
    out = ChunkRows.empty(ROWS, width, device)
    return lambda: round_chunk(x, act_fp8=act_fp8, out=out, dependent=True), [out.values]


def _compress(ratio: int, width: int, device: torch.device) -> tuple[Step, list[Tensor]]:
    halves = 2 if ratio == 4 else 1
    line = 2 * halves * width
    product, (cos, sin) = _floats(device, 1, ROWS, line), _turn(device)
    position, ring = torch.zeros(1, dtype=torch.int32, device=device), _floats(device, halves * ratio + ROWS, line)
    count = ROWS // ratio
    if width == WIDTH:
        entries = torch.zeros(count, record_bytes(width, TAIL), dtype=torch.uint8, device=device)
    else:
        entries = torch.empty(count, width, dtype=torch.bfloat16, device=device)
    offset, norm = _floats(device, ratio, line), torch.ones(width, device=device)
    rounding: compress.Rounding = "kv" if width == WIDTH else "index"
    return lambda: compress.compress(
        product, offset, position, ring, norm, cos, sin, entries, eps=EPS, rounding=rounding, dependent=True
    ), [entries, ring[:ROWS]]


def _index(device: torch.device) -> tuple[Step, list[Tensor]]:
    product, (cos, sin) = _floats(device, 1, ROWS, INDEX_HEADS * INDEX_WIDTH), _turn(device)
    out = torch.empty(ROWS, INDEX_HEADS, INDEX_WIDTH, dtype=torch.bfloat16, device=device)
    return lambda: index_rows.index_rows(
        product, cos, sin, heads=INDEX_HEADS, index_fp4=True, out=out, dependent=True
    ), [out]


def _visible(device: torch.device, position: int) -> Tensor:
    return ((torch.arange(position, position + ROWS, device=device) + 1) // 4).to(torch.int32)


def _scores(position: int, count: int, cut: index_scores.Tuning, device: torch.device) -> tuple[Step, list[Tensor]]:
    query = _floats(device, ROWS, INDEX_HEADS, INDEX_WIDTH).bfloat16()
    keys, weights = _floats(device, count, INDEX_WIDTH).bfloat16(), _floats(device, 8, ROWS, INDEX_HEADS)
    out, visible = torch.empty(ROWS, count, device=device), _visible(device, position)
    return lambda: index_scores.launch(query, keys, weights, visible, cut, out=out, dependent=True), [out]


def _top(position: int, count: int, cut: top_entries.Tuning, device: torch.device) -> tuple[Step, list[Tensor]]:
    scores, visible = _floats(device, ROWS, count), _visible(device, position)
    scratch = top_entries.Scratch.empty(ROWS, count, CHOSEN, device, cut)
    out = torch.empty(ROWS, CHOSEN, dtype=torch.int32, device=device)
    return lambda: top_entries.launch(scores, visible, CHOSEN, cut, scratch=scratch, out=out, dependent=True), [out]


def _route(device: torch.device) -> tuple[Step, list[Tensor]]:
    logits, bias = _floats(device, 4, ROWS, EXPERTS), torch.zeros(EXPERTS, device=device)
    out = (
        torch.empty(ROWS, CHOICES, dtype=torch.int32, device=device),
        torch.empty(ROWS, CHOICES, dtype=torch.float32, device=device),
    )
    return lambda: route.route(
        logits, bias=bias, table=None, tokens=None, k=CHOICES, factor=1.5, out=out, dependent=True
    ), [out[1]]
