"""Index scores: the twin and the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import index_scores as kernel
from dsv4nb_kernels.reference._fp4 import round_fp4
from dsv4nb_kernels.reference.index_scores import KEYS, index_scores, padded_keys


def draw(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return (
        torch.randn(rows, 4, 32, generator=generator),
        torch.randn(keys, 32, generator=generator),
        torch.randn(rows, 4, generator=generator),
    )


def test_matches_the_formula() -> None:
    query, keys, weights = draw(6, 2 * KEYS)
    expected = (torch.einsum("thd,cd->thc", query, keys).relu() * weights[..., None]).sum(1)
    torch.testing.assert_close(index_scores(query, keys, weights), expected, atol=1e-5, rtol=1e-5)


def test_a_row_and_a_key_depend_on_themselves_alone() -> None:
    query, keys, weights = draw(6, 3 * KEYS)
    batch = index_scores(query, keys, weights)
    for r in range(6):
        assert torch.equal(index_scores(query[r : r + 1], keys, weights[r : r + 1]), batch[r : r + 1])
    keys[200:] = torch.nan
    assert torch.equal(index_scores(query, keys, weights)[:, :200], batch[:, :200])
    assert torch.equal(index_scores(query, keys[:KEYS], weights), batch[:, :KEYS])


@pytest.mark.parametrize(("count", "padded"), [(1, 128), (128, 128), (129, 256)])
def test_reads_whole_blocks_of_keys(count: int, padded: int) -> None:
    assert padded_keys(count) == padded


ROUNDING = 1e-6  # of the sum of a score's terms without their signs
CUT = kernel.Tuning(keys=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the kernel is given."""

    query: Tensor
    keys: Tensor
    weights: Tensor
    visible: Tensor

    def rows(self, chosen: list[int]) -> Step:
        return replace(
            self,
            query=self.query[chosen],
            weights=self.weights[:, chosen].contiguous(),
            visible=self.visible[chosen],
        )


def draw_step(rows: int, heads: int, width: int, count: int, device: torch.device) -> Step:
    """Rows as `index_rows` makes them: e2m1 times powers of two that differ within a row."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def draw_rounded(*shape: int) -> Tensor:
        size = torch.exp2(torch.randint(-6, 7, (*shape[:-1], shape[-1] // 32, 1), generator=generator).float())
        return round_fp4((draw(*shape[:-1], shape[-1] // 32, 32) * size).flatten(-2)).bfloat16()

    return Step(
        query=draw_rounded(rows, heads, width).to(device),
        keys=draw_rounded(count, width).to(device),
        weights=draw(3, rows, heads).to(device),
        visible=(count - 7 * torch.arange(rows) - 1).clamp_min(1).to(torch.int32).to(device),
    )


def run(step: Step, cut: kernel.Tuning = CUT) -> Tensor:
    """[T, C], of which columns past every row's last visible one are left as they were."""
    rows, count = step.query.shape[0], step.keys.shape[0]
    room = torch.full((rows + 2, count), torch.nan, device=step.query.device)
    kernel.launch(step.query, step.keys, step.weights, step.visible, cut, out=room[1:-1])
    assert room[0].isnan().all() and room[-1].isnan().all()
    last = -(-int(step.visible.max()) // cut.keys) * cut.keys
    for first in range(0, rows, cut.rows):
        band = room[1:-1][first : first + cut.rows]
        own = -(-int(step.visible[first : first + cut.rows].max()) // cut.keys) * cut.keys
        assert not band[:, :own].isnan().any() and band[:, own:].isnan().all()
    return room[1:-1, :last]


def require_exact(step: Step, scores: Tensor) -> None:
    weights = (step.weights[0] + step.weights[1]) + step.weights[2]
    query, keys = step.query.double(), step.keys.double()
    exact = index_scores(query, keys, weights.double())[:, : scores.shape[1]]
    size = index_scores(query, keys, weights.double().abs())[:, : scores.shape[1]]
    assert bool(((scores.double() - exact).abs() <= ROUNDING * size + 1e-30).all())


def unequal_rows(step: Step, runs: Callable[[Step], Tensor], batches: list[list[int]]) -> int:
    """How many rows differ in any bit of what they see from the row alone, whoever stands beside it."""
    found = 0
    for batch in batches:
        together = runs(step.rows(batch))
        for place, row in enumerate(batch):
            seen = int(step.visible[row])
            alone = runs(step.rows([row]))[0, :seen]
            assert bool((alone != 0).any())
            found += not torch.equal(together[place, :seen], alone)
    return found


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [1, 3])
def test_the_kernel_matches_the_twin(rows: int, place: torch.device) -> None:
    step = draw_step(rows, 16, 32, 256, place)
    require_exact(step, run(step))


@pytest.mark.kernels
def test_the_kernel_leaves_what_nobody_sees(place: torch.device) -> None:
    step = draw_step(2, 16, 32, 384, place)
    step.visible.copy_(torch.tensor([3, 130]))
    assert run(step).shape == (2, 192)


@pytest.mark.kernels
@pytest.mark.parametrize("cut", [kernel.ALONE, kernel.FEW], ids=str)
def test_rows_alone_and_keys_asked_for_early_change_no_score(cut: kernel.Tuning, place: torch.device) -> None:
    step = draw_step(3, 16, 32, 512, place)
    step.visible.copy_(torch.tensor([200, 512, 5]))
    given = step.query, step.keys, step.weights, step.visible
    wanted, found = kernel.launch(*given, kernel.TUNING), kernel.launch(*given, cut)
    for row, seen in enumerate(step.visible.tolist()):
        assert torch.equal(found[row, :seen], wanted[row, :seen]), row


@pytest.mark.kernels
def test_m28_a_row_of_a_step_is_the_row_alone(place: torch.device) -> None:
    step = draw_step(4, 16, 32, 128, place)
    assert unequal_rows(step, run, [[0, 1, 2, 3], [3, 1]]) == 0
    # of many keys, and of a chunk, a program takes some rows; of a chunk its queries are on their way earlier
    chunk = replace(CUT, rows=4, stages=3)
    assert unequal_rows(step, lambda s: run(s, CUT if len(s.query) == 1 else chunk), [[0, 1, 2, 3] * 2 + [1]]) == 0


@pytest.mark.kernels
def test_m28_a_sum_by_the_number_of_rows_is_caught(place: torch.device) -> None:
    step = draw_step(4, 16, 32, 128, place)

    def keyed(step: Step) -> Tensor:
        order = [2, 1, 0] if step.query.shape[0] == 1 else [0, 1, 2]
        return run(replace(step, weights=step.weights[order].contiguous()))

    assert unequal_rows(step, keyed, [[0, 1, 2, 3]]) > 0


@pytest.mark.kernels
def test_the_kernel_refuses_by_name(place: torch.device) -> None:
    step = draw_step(2, 16, 32, 128, place)
    many = torch.zeros(4097, 16, 32, dtype=torch.bfloat16, device=place)
    cases: list[tuple[Step, str]] = [
        (replace(step, query=many), "query must have 1 to 4096 rows; got 4097"),
        (replace(step, query=step.query[0]), r"query must be \[T, Hi, d\]"),
        (replace(step, query=step.query[:, :12].contiguous()), "heads must be a power of two from 16 on; got 12"),
        (replace(step, query=step.query[..., :8].contiguous()), "channels must be a power of two from 16 on; got 8"),
        (replace(step, query=step.query.float()), "query must be torch.bfloat16"),
        (
            replace(step, keys=step.keys[:100].contiguous()),
            "keys must have a multiple of 128 entries up to .*; got 100",
        ),
        (replace(step, keys=step.keys.t().contiguous().t()), "keys must be contiguous"),
        (replace(step, weights=step.weights[0]), r"weights must be \[S, T, Hi\]"),
        (replace(step, weights=step.weights[:, :1].contiguous()), "weights must have shape"),
        (replace(step, visible=step.visible.long()), "visible must be torch.int32"),
    ]
    for bad, named in cases:
        with pytest.raises(ValueError, match=named):
            kernel.index_scores(bad.query, bad.keys, bad.weights, bad.visible)
    with pytest.raises(ValueError, match="out must have shape"):
        out = torch.zeros(2, 64, device=place)
        kernel.index_scores(step.query, step.keys, step.weights, step.visible, out=out)


@pytest.mark.gpu
def test_m28_the_models_scores_are_exact_and_row_invariant() -> None:
    step = draw_step(8, 64, 128, 4096, torch.device("cuda"))
    require_exact(step, run(step, kernel.TUNING))
    batches = [*(list(range(rows)) for rows in range(1, 9)), [5, 3, 0, 7, 1, 6]]
    assert unequal_rows(step, lambda s: run(s, kernel.TUNING), batches) == 0

    def as_launched(s: Step) -> Tensor:
        return kernel.index_scores(s.query, s.keys, s.weights, s.visible)

    assert unequal_rows(step, as_launched, [*batches, [5, 3, 0, 7, 1, 6] * 25]) == 0


@pytest.mark.gpu
def test_keys_that_nobody_sees_change_no_score() -> None:
    device = torch.device("cuda")
    step = draw_step(8, 64, 128, 1024, device)
    unseen = torch.full((262_144 - 1024, 128), torch.nan, dtype=torch.bfloat16, device=device)
    longer = replace(step, keys=torch.cat((step.keys, unseen)))
    wanted = run(step, kernel.TUNING)
    assert torch.equal(run(longer, kernel.TUNING), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_captured_scores_follow_their_inputs(rows: int) -> None:
    step = draw_step(rows, 64, 128, 1024, torch.device("cuda"))
    outs = [torch.empty(rows, 1024, device=step.query.device) for _ in range(3)]

    def chain(dependent: bool) -> None:
        for out in outs:
            kernel.index_scores(step.query, step.keys, step.weights, step.visible, out=out, dependent=dependent)

    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for turn in range(3):
        step.query.copy_(step.query.roll(turn + 1, 1))
        step.visible.sub_(100)
        expected = run(step, kernel.TUNING)
        for _ in range(3):
            for out in outs:
                out.fill_(torch.nan)
            graph.replay()
            for out in outs:
                for row, seen in enumerate(step.visible.tolist()):
                    assert torch.equal(out[row, :seen], expected[row, :seen])
