"""Attention to lists of keys: the twin (C-10), and the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import sparse_attention as kernel
from dsv4nb_kernels._rounded_rows import RoundedRows
from dsv4nb_kernels.reference._records import pack_records, unpack_records
from dsv4nb_kernels.reference._rotary import rotate_tail
from dsv4nb_kernels.reference.sparse_attention import sparse_attention

Split = tuple[torch.Tensor, torch.Tensor]


def draw(rows: int, sizes: tuple[int, ...]) -> tuple[torch.Tensor, list[Split], torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    query = torch.randn(rows, 4, 64, generator=generator)
    splits = []
    for size in sizes:
        keys = torch.randn(rows, size, 64, generator=generator)
        splits.append((keys, torch.rand(rows, size, generator=generator) < 0.4))
    return query, splits, torch.randn(4, generator=generator)


def formula(query: torch.Tensor, splits: list[Split], sink: torch.Tensor, scale: float) -> torch.Tensor:
    keys = torch.cat([k for k, _ in splits], 1).double()
    hidden = torch.cat([h for _, h in splits], 1)
    z = (torch.einsum("thd,tnd->thn", query.double(), keys) * scale).masked_fill(hidden[:, None], -math.inf)
    weights = torch.cat((z, sink.double()[:, None].expand(query.shape[0], -1, -1)), -1).softmax(-1)[..., :-1]
    return torch.einsum("thn,tnd->thd", weights, keys).float()


def test_matches_the_formula() -> None:
    query, splits, sink = draw(6, (128, 32, 32))
    torch.testing.assert_close(
        sparse_attention(query, splits, sink, scale=0.125), formula(query, splits, sink, 0.125), atol=1e-5, rtol=1e-5
    )


def test_a_row_without_keys_is_zero_wherever_it_stands() -> None:
    query, splits, sink = draw(16, (32, 32))
    before = sparse_attention(query, splits, sink, scale=0.125)
    for first, last in ((0, 14), (5, 10)):
        masked = [(keys, hidden.clone()) for keys, hidden in splits]
        for _, hidden in masked:
            hidden[first:last] = True
        out = sparse_attention(query, masked, sink, scale=0.125)
        assert torch.equal(out[first:last], torch.zeros(last - first, 4, 64))
        assert torch.equal(out[:first], before[:first])
        assert torch.equal(out[last:], before[last:])


def test_one_key_of_score_zero_and_sink_zero_give_half_the_value() -> None:
    keys = torch.arange(64.0).expand(1, 1, -1)
    out = sparse_attention(
        torch.zeros(1, 2, 64), [(keys, torch.zeros(1, 1, dtype=torch.bool))], torch.zeros(2), scale=1.0
    )
    assert torch.equal(out, keys.expand(1, 2, -1) / 2)


def test_a_split_of_hidden_keys_changes_no_bit() -> None:
    query, splits, sink = draw(6, (128, 32))
    fewer = sparse_attention(query, splits, sink, scale=0.125)
    extra = (torch.randn(6, 32, 64) * 1e3, torch.ones(6, 32, dtype=torch.bool))
    assert torch.equal(sparse_attention(query, [*splits, extra], sink, scale=0.125), fewer)


def test_a_row_of_a_batch_equals_the_row_alone() -> None:
    query, splits, sink = draw(9, (128, 32, 32))
    batch = sparse_attention(query, splits, sink, scale=0.125)
    for r in range(9):
        alone = [(keys[r : r + 1], hidden[r : r + 1]) for keys, hidden in splits]
        assert torch.equal(sparse_attention(query[r : r + 1], alone, sink, scale=0.125), batch[r : r + 1])


LIMIT = 2e-3  # of a row's length, probabilities and result rounded to bfloat16
CUT = kernel.Tuning(keys=16, heads=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the kernel is given, with room around the keys for places nobody names."""

    query: Tensor
    window: kernel.Keys
    entries: kernel.Keys
    sink: Tensor
    cos: Tensor
    sin: Tensor
    scale: float

    def rows(self, chosen: list[int]) -> Step:
        return replace(
            self,
            query=self.query[chosen],
            window=replace(self.window, places=self.window.places[chosen]),
            entries=replace(self.entries, places=self.entries.places[chosen]),
            cos=self.cos[chosen],
            sin=self.sin[chosen],
        )


def draw_step(
    rows: int, heads: int, width: int, sizes: tuple[int, int], device: torch.device, tail: int | None = None
) -> Step:
    """Sinks on both sides of the logits, lists with gaps, ends without keys, and NaN where nobody looks."""
    tail = tail or width // 8
    generator = torch.Generator().manual_seed(7)

    def draw_keys(count: int) -> kernel.Keys:
        cache = torch.randn(2 * count, width, generator=generator).bfloat16()
        places = torch.stack([torch.randperm(2 * count - 1, generator=generator)[:count] for _ in range(rows)])
        places = places.masked_fill(torch.rand(rows, count, generator=generator) < 0.2, -1)
        places[0, count // 2 :] = -1
        cache[-1] = torch.nan
        return kernel.Keys(cache=cache.to(device), places=places.to(torch.int32).to(device))

    angle = torch.rand(rows, tail // 2, generator=generator) * 6
    return Step(
        query=(torch.randn(rows, heads, width, generator=generator) * 3).bfloat16().to(device),
        window=draw_keys(sizes[0]),
        entries=draw_keys(sizes[1]),
        sink=torch.linspace(-20, 20, heads).to(device),
        cos=angle.cos().repeat_interleave(2, -1).to(device),
        sin=torch.stack((angle.sin(), -angle.sin()), -1).flatten(-2).to(device),
        scale=width**-0.5,
    )


def run(step: Step, cut: kernel.Tuning = CUT) -> Tensor:
    """[T, H · hd]; holds the kernel to its own rows and to every element of them."""
    rows, heads, width = step.query.shape
    out = RoundedRows.empty(rows + 2, heads * width, step.query.device)
    out.codes.fill_(torch.nan)
    out.scales.fill_(torch.nan)
    inner = RoundedRows(codes=out.codes[1:-1], scales=out.scales)
    kernel.launch(
        step.query, step.window, step.entries, step.sink, step.cos, step.sin, cut, scale=step.scale, out=inner
    )
    assert out.codes[0].isnan().all() and out.codes[-1].isnan().all() and inner.scales[:, rows:].isnan().all()
    return values(inner)


def values(out: RoundedRows) -> Tensor:
    rows = out.codes.shape[0]
    return out.codes.double() * out.scales[:, :rows].t().double().repeat_interleave(128, 1)


def recorded(step: Step) -> tuple[Step, Step]:
    """The step with keys in records, and with the bfloat16 rows that they stand for."""
    width, tail = step.query.shape[2], step.cos.shape[1]

    def pack(keys: kernel.Keys) -> tuple[kernel.Keys, kernel.Keys]:
        size = torch.exp2(torch.arange(len(keys.cache)) % 9 - 4.0)[:, None]
        records = pack_records((keys.cache.cpu().float() * size).nan_to_num().bfloat16().float(), tail)
        records[-1] = 0xFF  # NaN, its scales too
        rows = unpack_records(records, width, tail)
        assert rows[-1].isnan().all() and not rows[:-1].isnan().any()
        device = keys.cache.device
        return replace(keys, cache=records.to(device)), replace(keys, cache=rows.to(device))

    window, entries = pack(step.window), pack(step.entries)
    return (
        replace(step, window=window[0], entries=entries[0]),
        replace(step, window=window[1], entries=entries[1]),
    )


def by_twin(step: Step) -> Tensor:
    splits = [
        (keys.cache[keys.places.long().clamp_min(0)].nan_to_num().double(), keys.places < 0)
        for keys in (step.window, step.entries)
    ]
    mixed = sparse_attention(step.query.double(), splits, step.sink.double(), scale=step.scale)
    return rotate_tail(mixed, step.cos[:, None].double(), step.sin[:, None].double()).flatten(1)


def require_close(out: Tensor, exact: Tensor) -> None:
    error = (out - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) <= LIMIT


def unequal_rows(step: Step, runs: Callable[[Step], Tensor], batches: list[list[int]]) -> int:
    """How many rows differ in any bit from the row alone, whoever stands beside it."""
    alone = {row: runs(step.rows([row]))[0] for row in {row for batch in batches for row in batch}}
    assert all(bool((out != 0).any()) for out in alone.values())
    pairs = ((out, alone[row]) for batch in batches for out, row in zip(runs(step.rows(batch)), batch, strict=True))
    return sum(not torch.equal(out, one) for out, one in pairs)


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [1, 3])
def test_the_kernel_matches_the_twin(rows: int, place: torch.device) -> None:
    step = draw_step(rows, 16, 128, (32, 48), place)
    require_close(run(step), by_twin(step))


@pytest.mark.kernels
def test_records_give_the_bits_of_the_rows_that_they_stand_for(place: torch.device) -> None:
    step = draw_step(3, 16, 128, (32, 48), place, tail=64)
    # queries of few bits: sums of logits are exact, in whatever parts the interpreter adds them up
    records, rows = recorded(replace(step, query=step.query.sign().bfloat16()))
    assert torch.equal(run(records), run(rows))
    records, rows = recorded(step)
    require_close(run(records), by_twin(rows))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("sizes", [(128, 32), (128, 512), (128, 1024)])
def test_the_models_records_give_the_bits_of_their_rows(rows: int, sizes: tuple[int, int]) -> None:
    records, plain = recorded(draw_step(rows, 32, 512, sizes, torch.device("cuda")))
    assert torch.equal(run(records, kernel.TUNING), run(plain, kernel.TUNING))
    require_close(run(records, kernel.TUNING), by_twin(plain))


@pytest.mark.kernels
def test_m28_a_row_of_a_step_is_the_row_alone(place: torch.device) -> None:
    step = draw_step(4, 16, 128, (32, 32), place)
    assert unequal_rows(step, run, [[0, 1, 2, 3], [3, 1]]) == 0


def cancelling(step: Step) -> Step:
    """Keys and their negatives under almost equal weights: what is left is near the last bits of the sums."""

    def cancel(keys: kernel.Keys) -> kernel.Keys:
        half = keys.places.shape[1] // 2
        order = torch.stack([torch.randperm(2 * half) for _ in range(keys.places.shape[0])])
        cache = torch.cat((keys.cache[:half], -keys.cache[:half]))
        return kernel.Keys(cache=cache, places=order.to(torch.int32).to(cache.device))

    query = step.query * 2.0**-12
    return replace(step, query=query, window=cancel(step.window), entries=cancel(step.entries))


@pytest.mark.kernels
def test_m28_a_cut_by_the_number_of_rows_is_caught(place: torch.device) -> None:
    torch.manual_seed(0)
    step = cancelling(draw_step(2, 16, 128, (32, 32), place))

    def keyed(step: Step) -> Tensor:
        return run(step, replace(CUT, keys=16 if step.query.shape[0] == 1 else 32))

    assert unequal_rows(step, run, [[0, 1]]) == 0
    assert unequal_rows(step, keyed, [[0, 1]]) > 0


@pytest.mark.kernels
@pytest.mark.parametrize("columns", [144, 400])  # 12 splits, which registers hold at once, and 28, which they do not
def test_hidden_keys_at_the_end_change_no_bit_and_a_row_without_keys_is_zero(columns: int, place: torch.device) -> None:
    step = draw_step(2, 16, 128, (32, 16), place)
    hidden = torch.full((2, columns), -1, dtype=torch.int32, device=place)
    longer = replace(step, entries=replace(step.entries, places=torch.cat((step.entries.places, hidden), 1)))
    assert torch.equal(run(longer), run(step))
    blind = replace(
        step,
        window=replace(step.window, places=hidden[:, :32].contiguous()),
        entries=replace(step.entries, places=hidden[:, :16].contiguous()),
    )
    assert not run(blind).any()


@pytest.mark.gpu
@pytest.mark.parametrize("longest", [64, 256, 1024, 8192])
def test_entries_that_nobody_sees_change_no_bit_of_the_models_attention(longest: int) -> None:
    device = torch.device("cuda")
    step, _ = recorded(draw_step(8, 64, 512, (128, 32), device))
    hidden = torch.full((8, longest - 32), -1, dtype=torch.int32, device=device)
    longer = replace(step, entries=replace(step.entries, places=torch.cat((step.entries.places, hidden), 1)))
    assert torch.equal(run(longer, kernel.TUNING), run(step, kernel.TUNING))


@pytest.mark.kernels
def test_the_kernel_refuses_by_name(place: torch.device) -> None:
    step = draw_step(2, 16, 128, (32, 16), place)
    many = torch.zeros(9, 16, 128, dtype=torch.bfloat16, device=place)
    short = replace(step.window, places=step.window.places[:, :8].contiguous())
    wide = replace(step.window, places=step.window.places.long())
    narrow = replace(step.entries, cache=step.entries.cache[:, :64].contiguous())
    strided = step.query.transpose(0, 1).contiguous().transpose(0, 1)
    few = kernel.Partials.empty(2, 1, 16, 128, place)
    mixed = recorded(draw_step(2, 16, 128, (32, 16), place, tail=64))
    short_tail = replace(mixed[0], cos=step.cos, sin=step.sin)
    cases: list[tuple[Step, dict[str, object], str]] = [
        (replace(step, query=many), {}, "query must have 1 to 8 rows; got 9"),
        (replace(step, query=step.query.float()), {}, "query must be torch.bfloat16"),
        (replace(step, query=strided), {}, "query must be contiguous"),
        (replace(step, query=step.query[:, :8].contiguous()), {}, "query must have a multiple of 16 heads"),
        (replace(step, query=step.query[..., :64].contiguous()), {}, "query must be 128, 256 or 512 wide"),
        (replace(step, window=short), {}, "window.places must have a multiple of 16 columns"),
        (replace(step, window=wide), {}, "window.places must be torch.int32"),
        (replace(step, entries=narrow), {}, "entries.cache must have shape"),
        (replace(mixed[0], entries=mixed[1].entries), {}, "entries.cache must have shape"),
        (replace(mixed[1], entries=mixed[0].entries), {}, "entries.cache must have shape"),
        (short_tail, {}, "window.cache: of a record .* the tail are multiples of 64"),
        (replace(step, sink=step.sink[:4].contiguous()), {}, "sink must have shape"),
        (replace(step, cos=step.cos.double()), {}, "cos must be torch.float32"),
        (step, {"partials": few}, "mixed must have shape"),
        (step, {"out": RoundedRows.empty(2, 128, place)}, "codes must have shape"),
    ]
    for bad, more, named in cases:
        with pytest.raises(ValueError, match=named):
            kernel.launch(bad.query, bad.window, bad.entries, bad.sink, bad.cos, bad.sin, CUT, scale=1.0, **more)  # type: ignore[arg-type]


REAL = (128, 512)  # keys of a decode step: window and picked entries


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [32, 64])
def test_m28_the_models_attention_is_close_and_row_invariant(heads: int) -> None:
    step = draw_step(8, heads, 512, REAL, torch.device("cuda"))
    records, rows = recorded(step)
    batches = [*(list(range(rows)) for rows in range(1, 9)), [5, 3, 0, 7, 1, 6]]
    for given in (step, cancelling(step), records):
        assert unequal_rows(given, lambda s: run(s, kernel.TUNING), batches) == 0
    require_close(run(records, kernel.TUNING), by_twin(rows))
    require_close(run(step, kernel.TUNING), by_twin(step))


@pytest.mark.gpu
def test_both_forms_agree() -> None:
    drawn = draw_step(3, 32, 512, REAL, torch.device("cuda"))
    for step in (drawn, *recorded(drawn)):
        given = (step.query, step.window, step.entries, step.sink, step.cos, step.sin, kernel.TUNING)
        plain = values(kernel.launch(*given, scale=step.scale, tensor_cores=False))
        require_close(values(kernel.launch(*given, scale=step.scale, tensor_cores=True)), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_captured_launches_follow_their_inputs(rows: int) -> None:
    device = torch.device("cuda")
    step, _ = recorded(draw_step(rows, 32, 512, REAL, device))
    outs = [RoundedRows.empty(rows, 32 * 512, device) for _ in range(3)]
    partials = kernel.Partials.empty(rows, sum(REAL) // kernel.TUNING.keys, 32, 512, device)

    def chain(dependent: bool) -> None:
        for out in outs:
            kernel.sparse_attention(
                step.query,
                step.window,
                step.entries,
                step.sink,
                step.cos,
                step.sin,
                scale=step.scale,
                partials=partials,
                out=out,
                dependent=dependent,
            )

    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for turn in range(3):
        step.query.mul_(-0.75)
        step.entries.places.copy_(step.entries.places.roll(turn, 1))
        chain(False)
        expected = values(outs[0])
        assert bool((expected != 0).any(-1).all())
        for _ in range(3):
            for out in outs:
                out.codes.fill_(torch.nan)
            graph.replay()
            assert all(torch.equal(values(out), expected) for out in outs)
