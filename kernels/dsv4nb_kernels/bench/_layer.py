"""One layer of V4-Flash on one GPU of a pair, kernel after kernel, at 1K of context.

Every launch of a decode or verify step. Where there are two GPUs, both run the layer and meet in its two joins;
without them the other GPU's parts are missing from the sums. Routes are given, so that a step has as many experts as
independent rows name; everything else flows from kernel to kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import (
    _expert_rows,
    bf16_rows,
    compress,
    expert_down,
    expert_up,
    fp8_rows,
    hyper_mix,
    norm_rope_write,
    peer_join,
    route,
    sparse_attention,
)
from dsv4nb_kernels._expert_weights import DownWeights, UpWeights
from dsv4nb_kernels._peer import POLLS, Link, connect
from dsv4nb_kernels._rounded_rows import RoundedRows, round_rows
from dsv4nb_kernels.bench import expert_up as experts_bench
from dsv4nb_kernels.bench._driver import Arm, Launch, random_words
from dsv4nb_kernels.bench._records import random_records

OP = "layer"
HIDDEN, INNER, LATENT, HEADS, WIDTH, TAIL, GROUPS = 4096, 1024, 1024, 32, 512, 64, 4
EXPERTS, CHOICES = 256, 6
EPS, ITERATIONS = 1e-6, 20
CONTEXT = 1024
# the compressors' ratios and widths; and how many layers of a model are of the kind
KINDS: dict[str, tuple[tuple[tuple[int, int], ...], int]] = {
    "4": (((4, WIDTH), (4, 128)), 21),
    "128": (((128, WIDTH),), 20),
    "window": ((), 2),
}
# T, experts of the rows together: as many as independent rows name; and of six rows thirty, as `expert_up` is measured
UNIONS = ((1, 6), (2, 12), (4, 23), (6, 34), (6, 30))

# how the halves of a sublayer's output meet: not at all, in the boundary's first kernel, in a kernel of their own
JOINS = {"none": "without the joins", "inside": "with the joins", "apart": "joins in kernels of their own"}
PAIR = torch.device("cuda", 0), torch.device("cuda", 1)

Step = Callable[[int], object]


def arms(device: torch.device) -> list[Arm]:
    """Return each kind of layer at every T, with joins where there are two GPUs."""
    return [
        Arm(
            op=OP,
            shape=kind if distinct != 30 else f"{kind}, 30",
            rows=rows,
            name=name,
            bytes_read=_bytes(kind, distinct),
            make=partial(_make, device, kind, rows, distinct, joins),
            check=partial(_check, device, kind, rows, distinct, joins),
            is_product=joins != "apart",
            is_pair=joins != "none",
        )
        for kind in KINDS
        for rows, distinct in UNIONS
        for joins, name in JOINS.items()
        if joins == "none" or torch.cuda.device_count() > 1
    ]


def _bytes(kind: str, distinct: int) -> int:
    """Weights and scales that a layer reads once; 16-byte scales of FP8 left out."""
    fp8 = (LATENT + WIDTH) * HIDDEN + HEADS * WIDTH * LATENT + 2 * HIDDEN * HIDDEN
    compressors = sum(_lines(ratio, width) * HIDDEN * 2 for ratio, width in KINDS[kind][0])
    mixes = 2 * hyper_mix.COEFFICIENTS * hyper_mix.STREAMS * HIDDEN * 4
    moe = distinct * 3 * INNER * HIDDEN * 17 // 32 + 3 * INNER * HIDDEN
    return fp8 + compressors + mixes + EXPERTS * HIDDEN * 2 + moe


def _lines(ratio: int, width: int) -> int:
    return 2 * width * (2 if ratio == 4 else 1)


@dataclass(frozen=True, slots=True)
class _Bench:
    """Where the parts of a layer find their device, rows and weights."""

    device: torch.device
    rows: int
    count: int
    link: Link | None = None
    joins: str = "none"

    def floats(self, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        return torch.randn(shape, generator=generator, device=self.device)

    def turn(self) -> tuple[Tensor, Tensor]:
        angle = self.floats(self.rows, TAIL // 2)
        return angle.cos().repeat_interleave(2, -1), torch.stack((-angle.sin(), angle.sin()), -1).flatten(-2)

    def fp8(self, n: int, k: int) -> list[fp8_rows.Fp8Matrix]:
        return experts_bench.shared_matrices(self.device, n, k, self.count)

    def bf16(self, n: int, k: int) -> list[bf16_rows.Bf16Matrix]:
        words = random_words(self.device, self.count * n * k // 2, ~0x40004000).view(self.count, -1)
        return [bf16_rows.Bf16Matrix(words=words[i], n=n, k=k) for i in range(self.count)]


@dataclass(frozen=True, slots=True)
class _Side:
    """One GPU's layer, and the streams that it moves."""

    launch: Launch
    boundary: hyper_mix.Boundary
    link: Link | None


def _make(device: torch.device, kind: str, rows: int, distinct: int, joins: str, count: int) -> Launch:
    sides = _sides(device, kind, rows, distinct, joins, count)
    return lambda i: sides[torch.cuda.current_device() if joins != "none" else 0].launch(i)


def _check(device: torch.device, kind: str, rows: int, distinct: int, joins: str) -> None:
    sides = _sides(device, kind, rows, distinct, joins, 1)
    before = sides[0].boundary.stream.clone()
    for _ in range(2):
        for side in sides:
            _once(side)
    for side in sides:
        x = side.boundary.x.to(before.device)
        assert bool(x.isfinite().all()) and bool((x != 0).any(-1).all()), "rows that are no numbers"
        assert torch.equal(x, sides[0].boundary.x), "GPUs that differ"
        assert side.link is None or not side.link.has_failed, "a join that gave up"
    assert not torch.equal(sides[0].boundary.stream, before), "streams that stand still"


def _once(side: _Side) -> None:
    with torch.cuda.device(side.boundary.x.device):
        side.launch(0)


def _sides(device: torch.device, kind: str, rows: int, distinct: int, joins: str, count: int) -> list[_Side]:
    if joins == "none":
        return [_layer(_Bench(device, rows, count), kind, distinct)]
    # first with joins that give up at once: nobody may wait for a kernel that is still being compiled
    for polls, copies in ((1, 1), (POLLS, count)):
        links = connect(HIDDEN, PAIR, polls=polls)
        sides = [
            _layer(_Bench(place, rows, copies, link, joins), kind, distinct)
            for place, link in zip(PAIR, links, strict=True)
        ]
        if polls == 1:
            for side in sides:
                _once(side)
        for place in PAIR:
            torch.cuda.synchronize(place)
    return sides


def _layer(bench: _Bench, kind: str, distinct: int) -> _Side:
    device, rows, count = bench.device, bench.rows, bench.count
    boundary = hyper_mix.Boundary.empty(rows, HIDDEN, device)
    boundary.post.fill_(0.5)
    boundary.comb.fill_(0.25)
    boundary.stream.copy_(bench.floats(rows, hyper_mix.STREAMS, HIDDEN))
    splits = fp8_rows.tuning(HIDDEN, HIDDEN).splits
    attended, moved = bench.floats(splits, rows, HIDDEN), bench.floats(1, rows, HIDDEN)
    spread = _expert_rows.ExpertRows.empty(rows, HIDDEN, device)
    steps = [
        *_mix(bench, boundary, moved, None),
        *_attention(bench, kind, boundary, attended),
        *_mix(bench, boundary, attended, spread),
        *_experts(bench, boundary.x, spread, moved[0], distinct),
    ]

    def launch(i: int) -> None:
        for step in steps:
            step(i % count)

    return _Side(launch, boundary, bench.link)


def _mix(
    bench: _Bench, boundary: hyper_mix.Boundary, y: Tensor, spread: _expert_rows.ExpertRows | None
) -> Iterator[Step]:
    n = hyper_mix.COEFFICIENTS
    fn = bench.floats(bench.count, n, hyper_mix.STREAMS * HIDDEN) * HIDDEN**-0.5
    ones, norm = torch.ones(n, device=bench.device), torch.ones(HIDDEN, device=bench.device)
    weights = [hyper_mix.HyperWeights(fn=fn[i], scale=ones, base=ones, norm=norm) for i in range(bench.count)]
    link, halves = bench.link, y
    if link is not None and bench.joins == "apart":
        ours, y = link, torch.empty(1, bench.rows, HIDDEN, device=bench.device)
        yield lambda i: peer_join.peer_join(halves, ours, out=y[0], dependent=True)
        link = None
    yield lambda i: hyper_mix.hyper_mix(
        y, boundary.stream, boundary, weights[i], iterations=ITERATIONS, hc_eps=EPS, norm_eps=EPS, act_fp8=True,
        spread=spread, out=boundary, dependent=True, link=link,
    )  # fmt: skip


def _attention(bench: _Bench, kind: str, boundary: hyper_mix.Boundary, out: Tensor) -> Iterator[Step]:
    device, rows = bench.device, bench.rows
    cos, sin = bench.turn()
    low, down = bench.fp8(LATENT + WIDTH, HIDDEN), fp8_rows.tuning(LATENT + WIDTH, HIDDEN).splits
    product = torch.empty(down, rows, LATENT + WIDTH, device=device)
    yield lambda i: fp8_rows.fp8_rows(boundary.rounded, low[i], out=product, dependent=True)
    norms = torch.ones(LATENT, device=device), torch.ones(WIDTH, device=device)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    ring, latent = random_records(256, WIDTH, TAIL, device), RoundedRows.empty(rows, LATENT, device)
    yield lambda i: norm_rope_write.norm_rope_rows(
        product, *norms, cos, sin, slots, ring, eps=EPS, act_fp8=True, kv_fp8=True, out=latent, dependent=True
    )
    entries = None
    for ratio, width in KINDS[kind][0]:
        steps, cache = _compressor(bench, boundary.x, ratio, width)
        yield from steps
        entries = cache if width == WIDTH else entries
    up, flat = bench.fp8(HEADS * WIDTH, LATENT), torch.empty(1, rows, HEADS * WIDTH, device=device)
    yield lambda i: fp8_rows.fp8_rows(latent, up[i], out=flat, dependent=True)
    query = torch.empty(rows, HEADS, WIDTH, dtype=torch.bfloat16, device=device)
    yield lambda i: norm_rope_write.norm_rope_heads(flat, cos, sin, heads=HEADS, eps=EPS, out=query, dependent=True)
    window = _keys(bench, ring, 128, 128)
    seen = None if entries is None else _keys(bench, entries, *_visible(KINDS[kind][0][0][0]))
    keys = window.places.shape[1] + (0 if seen is None else seen.places.shape[1])
    partials = sparse_attention.Partials.empty(rows, keys // sparse_attention.TUNING.keys, HEADS, WIDTH, device)
    mixed, sink = RoundedRows.empty(rows, HEADS * WIDTH, device), torch.zeros(HEADS, device=device)
    yield lambda i: sparse_attention.sparse_attention(
        query, window, seen, sink, cos, sin, scale=WIDTH**-0.5, partials=partials, out=mixed, dependent=True
    )
    group, groups = torch.empty_like(out), bench.fp8(HIDDEN, HIDDEN)
    yield lambda i: fp8_rows.fp8_rows(mixed, groups[i], groups=GROUPS, out=group, dependent=True)
    rounded, last = RoundedRows.empty(rows, HIDDEN, device), bench.fp8(HIDDEN, HIDDEN)
    yield lambda i: round_rows(group, act_fp8=True, out=rounded, dependent=True)
    yield lambda i: fp8_rows.fp8_rows(rounded, last[i], out=out, dependent=True)


def _visible(ratio: int) -> tuple[int, int]:
    """How many entries a row sees, and the places of its list."""
    count = CONTEXT // ratio
    return count, -(-count // sparse_attention.TUNING.keys) * sparse_attention.TUNING.keys


def _keys(bench: _Bench, cache: Tensor, count: int, places: int) -> sparse_attention.Keys:
    index = torch.arange(places, dtype=torch.int32, device=bench.device)
    index = torch.where(index < count, index, -1).expand(bench.rows, -1).contiguous()
    return sparse_attention.Keys(cache=cache, places=index)


def _compressor(bench: _Bench, x: Tensor, ratio: int, width: int) -> tuple[list[Step], Tensor]:
    """The product and the pooling of a compressor; of ratio 4 a window ends with the last row, of 128 none does."""
    device, rows, line = bench.device, bench.rows, _lines(ratio, width)
    weights, splits = bench.bf16(line, HIDDEN), bf16_rows.tuning(line, HIDDEN).splits
    product = torch.empty(splits, rows, line, device=device)
    first = CONTEXT - rows if ratio == 4 else CONTEXT - ratio // 2 - rows
    position = torch.tensor([first], dtype=torch.int32, device=device)
    count = CONTEXT // ratio + 32
    is_kv = width == WIDTH
    entries = random_records(count, WIDTH, TAIL, device) if is_kv else bench.floats(count, width).bfloat16()
    cos, sin = bench.turn()
    rest = (
        bench.floats(ratio, line), position, bench.floats((line // width // 2) * ratio + 8, line),
        torch.ones(width, device=device), cos, sin, entries,
    )  # fmt: skip
    rounding: compress.Rounding = "kv" if is_kv else "index"
    return [
        lambda i: bf16_rows.bf16_rows(x, weights[i], out=product, dependent=True),
        lambda i: compress.compress(product, *rest, eps=EPS, rounding=rounding, dependent=True),
    ], entries


def _experts(bench: _Bench, x: Tensor, spread: _expert_rows.ExpertRows, out: Tensor, distinct: int) -> Iterator[Step]:
    device, rows = bench.device, bench.rows
    gate, splits = bench.bf16(EXPERTS, HIDDEN), bf16_rows.tuning(EXPERTS, HIDDEN).splits
    logits, bias = torch.empty(splits, rows, EXPERTS, device=device), torch.zeros(EXPERTS, device=device)
    yield lambda i: bf16_rows.bf16_rows(x, gate[i], out=logits, dependent=True)
    chosen = torch.empty(rows, CHOICES, dtype=torch.int32, device=device), torch.empty(rows, CHOICES, device=device)
    yield lambda i: route.route(
        logits, bias=bias, table=None, tokens=None, k=CHOICES, factor=1.5, out=chosen, dependent=True
    )
    named = experts_bench.routes(device, rows, distinct, bench.count)
    shares = torch.full((rows, CHOICES), 1 / CHOICES, device=device)
    routed_up, routed_down = (
        experts_bench.routed_words(device, n, k) for n, k in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    ups = [UpWeights(routed=routed_up, shared=shared) for shared in bench.fp8(2 * INNER, HIDDEN)]
    downs = [DownWeights(routed=routed_down, shared=shared) for shared in bench.fp8(HIDDEN, INNER)]
    lines = torch.empty(rows * (CHOICES + 1) + 1, INNER, device=device)
    rounded = torch.empty_like(lines, dtype=torch.float16)
    yield lambda i: expert_up.expert_up(
        spread, named[i], shares, ups[i], limit=experts_bench.LIMIT, out=lines, dependent=True
    )
    yield lambda i: expert_down.expert_down(lines, named[i], downs[i], rounded=rounded, out=out, dependent=True)
