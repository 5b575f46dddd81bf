"""The head's slice and its best: the twin and the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import head_argmax as kernel
from dsv4nb_kernels._best import Best, Scored
from dsv4nb_kernels.reference.head_argmax import best, head_argmax, panel

UNROUNDED = 1e-6  # of a row's length
CUT = kernel.Tuning(rows=16, step=32)
N, K = 48, 64


def test_m41_of_equals_the_lowest_id_is_the_best_and_a_nan_above_all() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [-0.0, 0.0, -1.0, 0.0], [1.0, math.nan, math.inf, math.nan]])
    values, ids = best(logits, 100)
    assert ids.tolist() == [101, 100, 101]
    assert values[:2].tolist() == [3.0, 0.0] and values[2].isnan()


def test_the_twin_multiplies_and_finds_the_best() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(8, 32, generator=generator), torch.randn(24, 32, generator=generator)
    logits, values, ids = head_argmax(x, weight, 7)
    torch.testing.assert_close(logits, x @ weight.t())
    assert torch.equal(ids - 7, logits.argmax(1)) and torch.equal(values, logits.amax(1))


def test_a_panel_is_ranked_and_sums_the_whole_slice() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    shown = panel(logits, 3, 10)
    assert shown.ids.tolist() == [[11, 13, 12]] and shown.values.tolist() == [[2.0, 2.0, 1.0]]
    assert shown.log_sums.item() == pytest.approx(math.log(1 + math.e + 2 * math.e**2))


def draw(rows: int, width: int, seed: int, device: torch.device) -> Tensor:
    """bfloat16 values over eight binades."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-4, 5, (rows, width), generator=generator).float())
    return (torch.randn(rows, width, generator=generator) * sizes).bfloat16().to(device)


def run(x: Tensor, weight: Tensor, first_id: int = 0, cut: kernel.Tuning = CUT) -> Scored:
    """Holds the kernels to their own rows and to every element of them."""
    rows, n, device = x.shape[0], weight.shape[0], x.device
    room = torch.full(((rows + 1) * n,), torch.nan, device=device)
    ids = torch.full((rows + 4,), -7, dtype=torch.int32, device=device)
    best = Best(torch.full((rows,), torch.nan, device=device), ids[:rows])
    out = Scored(room[: rows * n].view(rows, n), best)
    kernel.launch(x, weight, first_id, cut, out=out)
    assert room[rows * n :].isnan().all() and not out.logits.isnan().any() and (ids[rows:] == -7).all()
    return out


def require_close(out: Tensor, exact: Tensor) -> None:
    error = (out.cpu().double() - exact.cpu()).norm(dim=-1) / exact.cpu().norm(dim=-1)
    assert float(error.max()) <= UNROUNDED


def unequal_rows(x: Tensor, product: Callable[[Tensor], Scored], batches: list[list[int]]) -> int:
    """How many rows differ in any bit from the row alone, whoever stands beside it."""
    alone = [product(x[i : i + 1].clone()) for i in range(x.shape[0])]
    found = 0
    for batch in batches:
        logits, (values, ids) = product(x[batch].contiguous())
        for place, row in enumerate(batch):
            own = alone[row]
            found += not (
                torch.equal(logits[place], own.logits[0])
                and torch.equal(values[place], own.best.values[0])
                and torch.equal(ids[place], own.best.ids[0])
            )
    return found


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_kernel_matches_the_twin(rows: int, place: torch.device) -> None:
    x, weight = draw(rows, K, 1, place), draw(N, K, 0, place)
    logits, found = run(x, weight, 1000)
    padded = torch.cat((x, x.new_zeros(8 - rows, K))).cpu().double()
    require_close(logits, head_argmax(padded, weight.cpu().double())[0][:rows])
    values, ids = best(logits, 1000)
    assert torch.equal(found.values, values) and torch.equal(found.ids.long(), ids)


@pytest.mark.kernels
def test_m41_equal_logits_go_to_the_lowest_id(place: torch.device) -> None:
    x, weight = draw(3, K, 1, place).round(), draw(N, K, 0, place).round()  # whole numbers: sums are exact in any order
    weight[17:] = weight[:1]  # in the same program, and in the next ones
    weight[1:17] = -weight[:1]
    logits, found = run(x, weight)
    assert found.ids.tolist() == [0 if row[0] > 0 else 1 for row in logits.tolist()]
    assert run(x * 0, weight).best.ids.tolist() == [0, 0, 0]


@pytest.mark.kernels
def test_a_logit_that_is_no_number_is_the_best(place: torch.device) -> None:
    x, weight = draw(2, K, 1, place), draw(N, K, 0, place)
    weight[[20, 30]] = torch.nan
    head = kernel.launch(x, weight, 0, CUT)
    assert head.best.values.isnan().all() and head.best.ids.tolist() == [20, 20]


@pytest.mark.kernels
def test_m28_a_row_of_a_step_is_the_row_alone(place: torch.device) -> None:
    x, weight = draw(5, K, 1, place), draw(N, K, 0, place)
    assert unequal_rows(x, lambda rows: run(rows, weight), [[0, 1, 2, 3, 4], [3, 1]]) == 0


@pytest.mark.kernels
def test_m28_a_cut_by_the_number_of_rows_is_caught(place: torch.device) -> None:
    x, weight = draw(8, 256, 1, place), draw(N, 256, 0, place)

    def keyed(rows: Tensor) -> Scored:
        # another order of the same products
        order = torch.arange(256).roll(97 if rows.shape[0] == 1 else 0)
        return run(rows[:, order].contiguous(), weight[:, order].contiguous())

    assert unequal_rows(x, keyed, [list(range(8))]) > 0


def draw_tied(rows: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and weights whose logits are whole numbers, many of them equal."""
    x, weight = draw(rows, K, 1, device).sign(), draw(n, K, 0, device).sign()
    return x, weight


@pytest.mark.kernels
@pytest.mark.parametrize(("n", "k"), [(400, 20), (48, 3), (16, 16)])
@pytest.mark.parametrize("tied", [False, True])
def test_the_kernels_panel_matches_the_twin(n: int, k: int, tied: bool, place: torch.device) -> None:
    x, weight = draw_tied(3, n, place) if tied else (draw(3, K, 1, place), draw(n, K, 0, place))
    parts = kernel.Parts.empty(3, n, place, CUT)
    logits = kernel.launch(x, weight, 50, CUT, parts=parts).logits
    shown, exact = kernel.launch_panel(logits, parts, k, 50, CUT), panel(logits.cpu().double(), k, 50)
    assert torch.equal(shown.ids.cpu().long(), exact.ids)
    assert torch.equal(shown.values.cpu().double(), exact.values)
    torch.testing.assert_close(shown.log_sums.cpu().double(), exact.log_sums, rtol=1e-6, atol=1e-6)


@pytest.mark.kernels
def test_the_kernels_refuse_by_name(place: torch.device) -> None:
    x, weight = draw(2, K, 1, place), draw(N, K, 0, place)
    logits = torch.zeros(2, 64, device=place)
    head, shown, parts = (
        Scored.empty(2, N, place),
        kernel.Panel.empty(2, 4, place),
        kernel.Parts.empty(2, 64, place),
    )
    few = kernel.Parts.empty(2, N, place)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: kernel.launch(x[:0], weight, 0, CUT), "x must be 1 to 8 rows"),
        (lambda: kernel.launch(torch.cat([x] * 5), weight, 0, CUT), r"x must be 1 to 8 rows; got \(10, 64\)"),
        (lambda: kernel.launch(x[:, :32].contiguous(), weight, 0, CUT), "x must have shape"),
        (lambda: kernel.launch(x.float(), weight, 0, CUT), r"x must be torch\.bfloat16"),
        (lambda: kernel.launch(x, weight[:40], 0, CUT), "weight must have a multiple of 16 rows; got 40"),
        (lambda: kernel.launch(x, weight[:, :40], 0, CUT), "weight must have a multiple of 32 columns; got 40"),
        (lambda: kernel.launch(x, weight.t().contiguous().t(), 0, CUT), "weight must be contiguous"),
        (lambda: kernel.launch(x, weight, -1, CUT), "ids must be 0 to 1073741823; got -1"),
        (lambda: kernel.launch(x, weight, 0, CUT, parts=few), "parts best must have shape"),
        (lambda: kernel.launch(x[:1], weight, 0, CUT, out=head), "out logits must have shape"),
        (lambda: kernel.head_argmax(x, weight), "weight must have a multiple of 64 rows; got 48"),
        (lambda: kernel.panel(logits[0], parts, 4), r"logits must be \[T, N\]"),
        (lambda: kernel.panel(logits, parts, 21), "k must be 1 to 20; got 21"),
        (lambda: kernel.panel(logits.double(), parts, 4), r"logits must be torch\.float32"),
        (lambda: kernel.panel(logits, parts, 4, out=shown._replace(ids=shown.values)), r"out ids must be torch\.int32"),
    ]
    for call, named in cases:
        with pytest.raises(ValueError, match=named):
            call()


MODEL = 64640, 4096


@pytest.mark.gpu
def test_m28_the_models_head_is_exact_and_row_invariant() -> None:
    device, (n, k) = torch.device("cuda"), MODEL
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(n, k, device=device, generator=generator).bfloat16()
    x = draw(8, k, 1, device)
    whole = run(x, weight, n, kernel.TUNING)
    require_close(whole.logits, x.double() @ weight.double().t())
    values, ids = best(whole.logits, n)
    assert torch.equal(whole.best.values, values) and torch.equal(whole.best.ids.long(), ids)
    batches = [*(list(range(rows)) for rows in range(1, 9)), [5, 3, 0, 7, 1, 6]]
    assert unequal_rows(x, lambda rows: run(rows, weight, n, kernel.TUNING), batches) == 0
    parts = kernel.Parts.empty(8, n, device)
    kernel.head_argmax(x, weight, n, parts=parts)
    shown, exact = kernel.panel(whole.logits, parts, 20, n), panel(whole.logits.double(), 20, n)
    for row in range(8):
        kernel.head_argmax(x[row : row + 1].clone(), weight, n, parts=(one := kernel.Parts.empty(1, n, device)))
        alone = kernel.panel(whole.logits[row : row + 1].clone(), one, 20, n)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, shown, strict=True))
    assert torch.equal(shown.ids.long(), exact.ids)
    torch.testing.assert_close(shown.log_sums.double(), exact.log_sums, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_captured_heads_follow_their_inputs(rows: int) -> None:
    device, (n, k) = torch.device("cuda"), (6400, 4096)
    x, weight = draw(rows, k, 1, device), draw(n, k, 0, device)
    heads, shown = [Scored.empty(rows, n, device) for _ in range(3)], kernel.Panel.empty(rows, 20, device)
    parts = kernel.Parts.empty(rows, n, device)

    def chain(dependent: bool) -> None:
        for head in heads:
            kernel.head_argmax(x, weight, 9, parts=parts, out=head, dependent=dependent)
            kernel.panel(head.logits, parts, 20, 9, out=shown, dependent=dependent)

    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for turn in range(3):
        x.copy_(draw(rows, k, turn + 2, device))
        expected = run(x, weight, 9, kernel.TUNING)
        kernel.head_argmax(x, weight, 9, parts=parts)
        panels = kernel.panel(expected.logits, parts, 20, 9)
        for _ in range(3):
            for head in heads:
                head.logits.fill_(torch.nan)
                head.best.ids.fill_(-1)
            shown.ids.fill_(-1)
            graph.replay()
            assert all(torch.equal(head.logits, expected.logits) for head in heads)
            assert all(torch.equal(head.best.ids, expected.best.ids) for head in heads)
            assert all(torch.equal(a, b) for a, b in zip(shown, panels, strict=True))
