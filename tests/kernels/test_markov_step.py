"""The drafter's bias of low rank and the next draft: the twin and the kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import markov_step as kernel
from dsv4nb_kernels._best import Best, Scored
from dsv4nb_kernels.reference.head_argmax import best
from dsv4nb_kernels.reference.markov_step import markov_step

UNROUNDED = 1e-6  # of a row's length
CUT = kernel.Tuning(rows=16)
N, V, R = 48, 100, 32


def test_the_twin_adds_the_line_of_the_token_before() -> None:
    base, markov_in = torch.tensor([[0.0, 1.0], [0.5, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])
    markov_out = torch.tensor([[1.0, 1.0], [-1.0, 0.0]])
    logits, values, ids = markov_step(base, torch.tensor([2, 1]), markov_in, markov_out, 10)
    assert logits.tolist() == [[4.0, -2.0], [2.5, 0.0]]
    assert values.tolist() == [4.0, 2.5] and ids.tolist() == [10, 10]


Given = tuple[Tensor, Tensor, Tensor, Tensor]


def draw(rows: int, device: torch.device, n: int = N, vocab: int = V, rank: int = R) -> Given:
    """Base rows, tokens and the two factors, over eight binades."""
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        sizes = torch.exp2(torch.randint(-4, 5, shape, generator=generator).float())
        return torch.randn(shape, generator=generator) * sizes

    tokens = torch.randint(vocab, (8,), generator=generator, dtype=torch.int32)[:rows]
    factors = numbers(vocab, rank).bfloat16(), numbers(n, rank).bfloat16()
    base = numbers(8, n)[:rows].contiguous()
    return base.to(device), tokens.to(device), factors[0].to(device), factors[1].to(device)


def run(given: Given, first_id: int = 0, cut: kernel.Tuning = CUT) -> Scored:
    """Holds the kernels to their own rows and to every element of them."""
    (rows, n), device = given[0].shape, given[0].device
    room = torch.full(((rows + 1) * n,), torch.nan, device=device)
    ids = torch.full((rows + 4,), -7, dtype=torch.int32, device=device)
    out = Scored(room[: rows * n].view(rows, n), Best(torch.full((rows,), torch.nan, device=device), ids[:rows]))
    kernel.launch(*given, first_id, cut, out=out)
    assert room[rows * n :].isnan().all() and (ids[rows:] == -7).all()
    return out


def require_twin(given: Given, first_id: int, cut: kernel.Tuning = CUT) -> None:
    scored = run(given, first_id, cut)
    base, tokens, markov_in, markov_out = given
    exact = markov_step(base.double(), tokens.long(), markov_in.double(), markov_out.double(), first_id)[0]
    error = (scored.logits.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) <= UNROUNDED
    values, ids = best(scored.logits, first_id)
    assert torch.equal(scored.best.values, values) and torch.equal(scored.best.ids.long(), ids)


def unequal_rows(given: Given, step: Callable[[Given], Scored], batches: list[list[int]]) -> int:
    """How many rows differ in any bit from the row alone, whoever stands beside it."""
    found, (base, tokens, *factors) = 0, given

    def rows(chosen: list[int]) -> Given:
        return base[chosen].contiguous(), tokens[chosen].contiguous(), factors[0], factors[1]

    for batch in batches:
        together = step(rows(batch))
        for place, row in enumerate(batch):
            alone = step(rows([row]))
            found += not (
                torch.equal(together.logits[place], alone.logits[0])
                and torch.equal(together.best.values[place], alone.best.values[0])
                and torch.equal(together.best.ids[place], alone.best.ids[0])
            )
    return found


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_kernel_matches_the_twin(rows: int, place: torch.device) -> None:
    require_twin(draw(rows, place), 50)


@pytest.mark.kernels
def test_m41_equal_logits_go_to_the_lowest_id(place: torch.device) -> None:
    base, tokens, markov_in, markov_out = draw(3, place)
    assert run((base * 0, tokens, markov_in, markov_out * 0), 7).best.ids.tolist() == [7, 7, 7]


@pytest.mark.kernels
def test_a_token_that_is_none_is_not_followed(place: torch.device) -> None:
    base, tokens, markov_in, markov_out = draw(3, place)
    tokens = torch.tensor([-1, 0, V + 5], dtype=torch.int32, device=place)
    near = torch.tensor([0, 0, V - 1], dtype=torch.int32, device=place)
    given, meant = run((base, tokens, markov_in, markov_out)), run((base, near, markov_in, markov_out))
    assert torch.equal(given.logits, meant.logits)


@pytest.mark.kernels
def test_the_logits_may_take_the_place_of_the_base(place: torch.device) -> None:
    given = draw(2, place)
    expected = run(given)
    out = Scored(given[0], Best.empty(2, place))
    kernel.launch(*given, 0, CUT, out=out)
    assert torch.equal(out.logits, expected.logits) and torch.equal(out.best.ids, expected.best.ids)


@pytest.mark.kernels
def test_m28_a_row_of_a_step_is_the_row_alone(place: torch.device) -> None:
    assert unequal_rows(draw(5, place), run, [[0, 1, 2, 3, 4], [3, 1]]) == 0


@pytest.mark.kernels
def test_m28_a_sum_by_the_number_of_rows_is_caught(place: torch.device) -> None:
    def keyed(given: Given) -> Scored:
        base, tokens, *factors = given
        turned = [factor.roll(13 if base.shape[0] == 1 else 0, 1).contiguous() for factor in factors]
        return run((base, tokens, turned[0], turned[1]))

    assert unequal_rows(draw(8, place), keyed, [list(range(8))]) > 0


@pytest.mark.kernels
def test_the_kernel_refuses_by_name(place: torch.device) -> None:
    base, tokens, markov_in, markov_out = draw(2, place)
    many = torch.zeros(9, N, device=place)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: kernel.launch(base[0], tokens, markov_in, markov_out, 0, CUT), r"base must be \[T, N\]"),
        (lambda: kernel.launch(many, tokens, markov_in, markov_out, 0, CUT), "base must have 1 to 8 rows; got 9"),
        (
            lambda: kernel.launch(base[:, :40], tokens, markov_in, markov_out, 0, CUT),
            "a multiple of 16 columns; got 40",
        ),
        (lambda: kernel.launch(base.double(), tokens, markov_in, markov_out, 0, CUT), r"base must be torch\.float32"),
        (lambda: kernel.launch(base, tokens.long(), markov_in, markov_out, 0, CUT), r"tokens must be torch\.int32"),
        (lambda: kernel.launch(base, tokens[:1], markov_in, markov_out, 0, CUT), "tokens must have shape"),
        (lambda: kernel.launch(base, tokens, markov_in[:, :24], markov_out, 0, CUT), "r must be a power of two"),
        (lambda: kernel.launch(base, tokens, markov_in.float(), markov_out, 0, CUT), r"markov_in must be torch\.bfl"),
        (lambda: kernel.launch(base, tokens, markov_in, markov_out[:32], 0, CUT), "markov_out must have shape"),
        (lambda: kernel.launch(base, tokens, markov_in, markov_out, -1, CUT), "ids must be 0 to"),
        (
            lambda: kernel.launch(base, tokens, markov_in, markov_out, 0, CUT, out=Scored.empty(1, N, place)),
            "out logits must have shape",
        ),
    ]
    for call, named in cases:
        with pytest.raises(ValueError, match=named):
            call()


MODEL = {"n": 64640, "vocab": 129280, "rank": 256}


@pytest.mark.gpu
def test_m28_the_models_step_is_exact_and_row_invariant() -> None:
    given = draw(8, torch.device("cuda"), **MODEL)
    require_twin(given, 64640, kernel.TUNING)
    batches = [*(list(range(rows)) for rows in range(1, 9)), [5, 3, 0, 7, 1, 6]]
    assert unequal_rows(given, lambda rows: run(rows, 64640, kernel.TUNING), batches) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_captured_rounds_follow_their_inputs(rows: int) -> None:
    device, steps, n = torch.device("cuda"), 5, MODEL["vocab"]
    base, tokens, markov_in, markov_out = draw(rows, device, n=n, vocab=n, rank=256)
    bases = [base.roll(100 * step, 1).contiguous() for step in range(steps)]
    scored = [Scored.empty(rows, n, device) for _ in range(steps)]
    parts = torch.empty(rows, n // kernel.TUNING.rows, dtype=torch.int64, device=device)

    def walk(dependent: bool) -> None:
        before = tokens
        for own, out in zip(bases, scored, strict=True):
            kernel.markov_step(own, before, markov_in, markov_out, parts=parts, out=out, dependent=dependent)
            before = out.best.ids

    walk(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        walk(True)
    seen = set()
    for turn in range(3):
        tokens.copy_(tokens.roll(1) + turn)
        walk(False)
        expected = [(out.logits.clone(), out.best.ids.clone()) for out in scored]
        for _ in range(3):
            for out in scored:
                out.logits.fill_(torch.nan)
                out.best.ids.fill_(-1)
            graph.replay()
            for out, (logits, ids) in zip(scored, expected, strict=True):
                assert torch.equal(out.logits, logits) and torch.equal(out.best.ids, ids)
        seen |= {tuple(ids.tolist()) for _, ids in expected}
    assert len(seen) > 3
