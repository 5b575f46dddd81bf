"""Attention of a chunk's rows: the twin, and the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import chunk_attention as kernel
from dsv4nb_kernels.reference._rotary import rotate_tail
from dsv4nb_kernels.reference.chunk_attention import chunk_attention

LIMIT = 2e-3  # of a row's length, probabilities and result rounded to bfloat16
CUT = kernel.Tuning(keys=16, heads=16)
# ratio, places of a row's list; a list of none: all that it sees
KINDS = {"window": (0, 0), "chosen": (4, 32), "all": (8, 0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What the kernel is given, with NaN where nobody may look."""

    query: Tensor
    position: int
    window: kernel.Window
    entries: kernel.Entries | None
    sink: Tensor
    cos: Tensor
    sin: Tensor

    def rows(self, first: int, last: int) -> Chunk:
        entries = self.entries
        if entries is not None and entries.places is not None:
            entries = replace(entries, places=entries.places[first:last].contiguous())
        return replace(
            self,
            query=self.query[first:last],
            position=self.position + first,
            entries=entries,
            cos=self.cos[first:last],
            sin=self.sin[first:last],
        )


def draw_chunk(
    rows: int,
    heads: int,
    width: int,
    seen: int,
    kind: tuple[int, int],
    position: int,
    device: torch.device,
) -> Chunk:
    """Sinks on both sides of the logits, lists with gaps, and a ring with more rows than it needs."""
    generator = torch.Generator().manual_seed(position + rows)
    (ratio, listed), last = kind, position + rows - 1

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    ring = torch.full((rows + seen + 5, width), torch.nan).bfloat16()
    held = torch.arange(max(position - seen + 1, 0), last + 1)
    ring[held % ring.shape[0]] = draw(len(held), width).bfloat16()
    entries = None
    if ratio:
        count = (last + 1) // ratio
        cache = torch.cat((draw(count, width), torch.full((3, width), torch.nan))).bfloat16().to(device)
        places = None
        if listed:
            visible = (torch.arange(position, last + 1) + 1) // ratio
            order = torch.rand(rows, max(count, listed), generator=generator)
            order[:, :count] += torch.arange(count) >= visible[:, None]
            order[:, count:] += 1
            places = order.argsort(1)[:, :listed]
            places[places >= visible[:, None]] = -1
            places[torch.rand(places.shape, generator=generator) < 0.1] = -1
            places = places.to(torch.int32).to(device)
        entries = kernel.Entries(cache=cache, ratio=ratio, places=places)
    angle = torch.rand(rows, width // 16, generator=generator) * 6
    return Chunk(
        query=(draw(rows, heads, width) * 3).bfloat16().to(device),
        position=position,
        window=kernel.Window(ring=ring.to(device), width=seen),
        entries=entries,
        sink=torch.linspace(-20, 20, heads).to(device),
        cos=angle.cos().repeat_interleave(2, -1).to(device),
        sin=torch.stack((angle.sin(), -angle.sin()), -1).flatten(-2).to(device),
    )


def run(chunk: Chunk, cut: kernel.Tuning = CUT, *, lanes: bool = False, tensor_cores: bool | None = None) -> Tensor:
    """[T, H, hd]; holds the kernel to its own rows and to every element of them."""
    rows, heads, width = chunk.query.shape
    out = torch.full((rows + 2, heads, width), torch.nan, dtype=torch.bfloat16, device=chunk.query.device)
    position = torch.tensor([chunk.position], dtype=torch.int32, device=chunk.query.device)
    kernel.launch(
        chunk.query, position, chunk.window, chunk.entries, chunk.sink, chunk.cos, chunk.sin, cut, scale=width**-0.5,
        out=out[1:-1], lanes=lanes, tensor_cores=tensor_cores,
    )  # fmt: skip
    assert out[0].isnan().all() and out[-1].isnan().all() and not out[1:-1].isnan().any()
    return out[1:-1]


def by_twin(chunk: Chunk) -> Tensor:
    """The twin in float64."""
    entries = chunk.entries
    mixed = chunk_attention(
        chunk.query.double(),
        chunk.position,
        chunk.window.ring.nan_to_num().double(),
        chunk.window.width,
        None if entries is None else entries.cache.nan_to_num().double(),
        1 if entries is None else entries.ratio,
        None if entries is None or entries.places is None else entries.places.long(),
        chunk.sink.double(),
        scale=chunk.query.shape[2] ** -0.5,
    )
    return rotate_tail(mixed, chunk.cos[:, None].double(), chunk.sin[:, None].double())


def require_close(out: Tensor, exact: Tensor) -> None:
    error = (out.double() - exact).flatten(1).norm(dim=-1) / exact.flatten(1).norm(dim=-1)
    assert float(error.max()) <= LIMIT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, 21])
def test_the_twin_is_the_formula_row_by_row(kind: str, position: int) -> None:
    chunk = draw_chunk(7, 16, 128, 8, KINDS[kind], position, torch.device("cpu"))
    out = by_twin(chunk)
    for row in range(7):
        own = position + row
        ring = chunk.window.ring.double()
        keys = [ring[p % len(ring)] for p in range(max(own - 7, 0), own + 1)]
        if chunk.entries is not None:
            entries, visible = chunk.entries, (own + 1) // chunk.entries.ratio
            numbers = range(visible) if entries.places is None else entries.places[row, :visible].tolist()
            keys += [entries.cache[n].double() for n in numbers if n >= 0]
        every = torch.stack(keys)
        z = torch.cat((chunk.query[row].double() @ every.t() * 128**-0.5, chunk.sink[:, None].double()), 1)
        mixed = z.softmax(1)[:, :-1] @ every
        turned = rotate_tail(mixed, chunk.cos[row].double(), chunk.sin[row].double())
        torch.testing.assert_close(out[row], turned, atol=1e-12, rtol=1e-12)


@pytest.mark.kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, 13, 150])
def test_the_kernel_matches_the_twin(kind: str, position: int, place: torch.device) -> None:
    chunk = draw_chunk(3, 16, 128, 32, KINDS[kind], position, place)
    require_close(run(chunk), by_twin(chunk))


def cancelling(chunk: Chunk) -> Chunk:
    """Keys and their negatives under almost equal weights: what is left is near the last bits of the sums."""

    def cancel(cache: Tensor) -> Tensor:
        half = cache[: cache.shape[0] // 2]
        return torch.cat((half, -half, cache[2 * half.shape[0] :]))

    entries = chunk.entries
    if entries is not None:
        entries = replace(entries, cache=cancel(entries.cache))
    window = replace(chunk.window, ring=cancel(chunk.window.ring.nan_to_num()))
    return replace(chunk, query=chunk.query * 2.0**-12, window=window, entries=entries)


def unequal_rows(chunk: Chunk, cut: kernel.Tuning, alone: kernel.Tuning) -> int:
    """How many rows of a chunk differ in any bit from the chunk of the row alone."""
    out = run(chunk, cut)
    return sum(not torch.equal(run(chunk.rows(i, i + 1), alone)[0], out[i]) for i in range(len(out)))


@pytest.mark.kernels
@pytest.mark.parametrize("kind", KINDS)
def test_m28_a_row_of_a_chunk_is_the_row_alone(kind: str, place: torch.device) -> None:
    chunk = draw_chunk(3, 16, 128, 32, KINDS[kind], 40, place)
    for given in (chunk, cancelling(chunk)):
        assert unequal_rows(given, CUT, CUT) == 0


@pytest.mark.kernels
def test_m28_a_cut_by_the_number_of_rows_is_caught(place: torch.device) -> None:
    chunk = cancelling(draw_chunk(3, 16, 128, 32, KINDS["chosen"], 150, place))
    assert unequal_rows(chunk, CUT, replace(CUT, keys=32)) > 0


@pytest.mark.kernels
def test_the_kernel_refuses_by_name(place: torch.device) -> None:
    chunk = draw_chunk(2, 16, 128, 32, KINDS["chosen"], 40, place)
    entries = chunk.entries
    assert entries is not None and entries.places is not None
    many = torch.zeros(4097, 16, 128, dtype=torch.bfloat16, device=place)
    strided = chunk.query.transpose(0, 1).contiguous().transpose(0, 1)
    small = replace(chunk.window, ring=chunk.window.ring[:32])
    short = replace(entries, places=entries.places[:, :8].contiguous())
    cases: list[tuple[Chunk, str]] = [
        (replace(chunk, query=many), "query must have 1 to 4096 rows; got 4097"),
        (replace(chunk, query=chunk.query.float()), "query must be torch.bfloat16"),
        (replace(chunk, query=strided), "query must be contiguous"),
        (replace(chunk, query=chunk.query[:, :8].contiguous()), "query must have a multiple of 16 heads; got 8"),
        (replace(chunk, query=chunk.query[..., :64].contiguous()), "query must be 128, 256 or 512 wide; got 64"),
        (replace(chunk, sink=chunk.sink[:4].contiguous()), "sink must have shape"),
        (replace(chunk, cos=chunk.cos.double()), "cos must be torch.float32"),
        (replace(chunk, window=replace(chunk.window, width=24)), "window.width must be a multiple of 16; got 24"),
        (replace(chunk, window=small), "window.ring must have at least 33 rows; got 32"),
        (replace(chunk, window=replace(chunk.window, ring=chunk.window.ring.float())), "window.ring must be torch.bf"),
        (replace(chunk, entries=replace(entries, ratio=0)), "entries.ratio must be positive; got 0"),
        (replace(chunk, entries=replace(entries, cache=entries.cache[:, :64].contiguous())), "entries.cache must have"),
        (replace(chunk, entries=short), "entries.places must have a multiple of 16 columns; got 8"),
        (replace(chunk, entries=replace(entries, places=entries.places.long())), "entries.places must be torch.int32"),
    ]
    position = torch.zeros(1, dtype=torch.int32, device=place)
    for bad, named in cases:
        with pytest.raises(ValueError, match=named):
            kernel.launch(
                bad.query, position, bad.window, bad.entries, bad.sink, bad.cos, bad.sin, CUT, scale=1.0, lanes=False
            )
    given = (chunk.window, entries, chunk.sink, chunk.cos, chunk.sin, CUT)
    with pytest.raises(ValueError, match=r"position must be torch\.int32"):
        kernel.launch(chunk.query, position.long(), *given, scale=1.0, lanes=False)
    with pytest.raises(ValueError, match="out must have shape"):
        kernel.launch(chunk.query, position, *given, scale=1.0, lanes=False, out=chunk.query[:1])


@pytest.mark.kernels
def test_what_every_gpu_takes_is_what_hopper_takes(place: torch.device) -> None:
    chunk = draw_chunk(2, 32, 128, 64, (4, 64), 40, place)
    position, rest = torch.zeros(1, dtype=torch.int32, device=place), (chunk.sink, chunk.cos, chunk.sin)
    entries = chunk.entries
    assert entries is not None and entries.places is not None
    short = replace(entries, places=entries.places[:, :32].contiguous())
    cases = [
        (chunk.query[:, :16].contiguous(), chunk.window, entries, "query must have a multiple of 32 heads"),
        (chunk.query, replace(chunk.window, width=32), entries, "window.width must be a multiple of 64; got 32"),
        (chunk.query, chunk.window, short, "entries.places must have a multiple of 64 columns; got 32"),
    ]
    for query, window, seen, named in cases:
        with pytest.raises(ValueError, match=named):
            kernel.chunk_attention(query, position, window, seen, *rest, scale=1.0)


REAL = {"window": (0, 0), "chosen": (4, 512), "all": (128, 0)}


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("position", [0, 300, 8192])
@pytest.mark.parametrize("kind", REAL)
def test_m28_the_models_attention_is_close_and_row_invariant(kind: str, position: int, heads: int) -> None:
    chunk = draw_chunk(150, heads, 512, 128, REAL[kind], position, torch.device("cuda"))
    require_close(run(chunk, lanes=True), by_twin(chunk))
    for given in (chunk, cancelling(chunk)):
        out = run(given, lanes=True)
        for first, last in ((0, 1), (149, 150), (60, 75)):
            assert torch.equal(run(given.rows(first, last), lanes=True), out[first:last])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", REAL)
def test_both_forms_agree(kind: str) -> None:
    chunk = draw_chunk(9, 32, 512, 128, REAL[kind], 3000, torch.device("cuda"))
    exact = by_twin(chunk)
    require_close(run(chunk, kernel.PLAIN), exact)
    require_close(run(chunk, CUT, tensor_cores=False), exact)
    require_close(run(chunk, lanes=True), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", REAL)
def test_captured_launches_follow_their_inputs(kind: str) -> None:
    device = torch.device("cuda")
    chunk = draw_chunk(40, 32, 512, 128, REAL[kind], 3000, device)
    position = torch.tensor([chunk.position], dtype=torch.int32, device=device)
    outs = [torch.empty_like(chunk.query) for _ in range(3)]

    def chain() -> None:
        for out in outs:
            kernel.chunk_attention(
                chunk.query, position, chunk.window, chunk.entries, chunk.sink, chunk.cos, chunk.sin,
                scale=512**-0.5, out=out,
            )  # fmt: skip

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for turn in range(3):
        chunk.query.mul_(-0.75)
        position.sub_(turn)
        chunk.window.ring.nan_to_num_()
        chain()
        expected = outs[0].clone()
        assert bool((expected != 0).any(-1).all())
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs)
