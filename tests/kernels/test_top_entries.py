"""The best entries: the twin and the kernel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import top_entries as kernel
from dsv4nb_kernels.reference.top_entries import top_entries


def test_ties_go_to_the_lowest_index_and_the_result_ascends() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 2.0, 1.0, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]])
    picked = top_entries(scores, torch.tensor([6, 6]), 4)
    assert picked.tolist() == [[0, 1, 3, 4], [0, 1, 2, 3]]


def test_hidden_columns_are_never_picked_whatever_they_hold() -> None:
    scores = torch.tensor([[1.0, 3.0, math.inf, math.nan], [-2.0, -1.0, -3.0, math.nan], [math.nan] * 4])
    picked = top_entries(scores, torch.tensor([2, 3, 0]), 2)
    assert picked.tolist() == [[0, 1], [0, 1], [-1, -1]]


def test_fewer_visible_than_wanted_are_filled_up() -> None:
    assert top_entries(torch.zeros(1, 8), torch.tensor([3]), 6).tolist() == [[0, 1, 2, -1, -1, -1]]
    assert top_entries(torch.zeros(1, 2), torch.tensor([2]), 6).tolist() == [[0, 1]]


def test_matches_a_sort_of_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 9, (40, 100), generator=generator).float()  # many ties
    visible = torch.randint(0, 101, (40,), generator=generator)
    for row, count, picked in zip(
        scores.tolist(), visible.tolist(), top_entries(scores, visible, 16).tolist(), strict=True
    ):
        best = sorted(range(count), key=lambda i: (-row[i], i))[:16]
        assert picked == sorted(best) + [-1] * (16 - len(best))


CUT = kernel.Tuning(block=64, last=128, spare=1)  # of 1100 entries 8: three rounds
WIDE = kernel.Tuning(block=64, last=128, spare=2)


def run(scores: Tensor, visible: Tensor, k: int, cut: kernel.Tuning = CUT) -> Tensor:
    """Holds the kernel to its own rows and to every element of them."""
    rows, width = scores.shape[0], min(k, scores.shape[1])
    room = torch.full(((rows + 1) * width + 64,), -7, dtype=torch.int32, device=scores.device)
    out = room[: rows * width].view(rows, width)
    kernel.launch(scores, visible, k, cut, out=out)
    assert (room[rows * width :] == -7).all()
    return out


def require_twin(scores: Tensor, visible: Tensor, k: int, cut: kernel.Tuning = CUT) -> None:
    twin = top_entries(scores.cpu(), visible.cpu().long(), k)
    assert torch.equal(run(scores, visible, k, cut).cpu().long(), twin)


def draw_scores(rows: int, count: int, device: torch.device) -> Tensor:
    """A row of numbers, one of many ties, one of a run of good neighbours, one of zeros of both signs, and again."""
    generator = torch.Generator().manual_seed(rows)
    scores = torch.randn(rows, count, generator=generator) * 3
    for row in range(rows):
        if row % 4 == 1:
            scores[row] = scores[row].round()
        elif row % 4 == 2:
            scores[row, count // 3 : count // 2] += 20
        elif row % 4 == 3:
            scores[row] = torch.where(scores[row] > 4, scores[row], scores[row].sign() * 0.0)
    return scores.to(device)


@pytest.mark.kernels
@pytest.mark.parametrize(("count", "k"), [(1100, 8), (96, 16), (9, 16), (256, 1)])
def test_the_kernel_matches_the_twin(count: int, k: int, place: torch.device) -> None:
    scores = draw_scores(4, count, place)
    visible = torch.tensor([count, count - 1, count // 2 + 3, count - 17], dtype=torch.int32, device=place)
    for row, seen in enumerate(visible.tolist()):
        scores[row, seen:] = torch.tensor([math.inf, math.nan])[row % 2]
    require_twin(scores, visible, k)
    if k <= 8:
        require_twin(scores, visible, k, WIDE)
    if count < 1000:  # as a chunk
        require_twin(scores.repeat(3, 1), visible.repeat(3), k)


@pytest.mark.kernels
@pytest.mark.parametrize("seen", [0, 1, 15, 16, 17])
def test_the_kernel_fills_up_what_is_missing(seen: int, place: torch.device) -> None:
    require_twin(draw_scores(1, 64, place), torch.tensor([seen], dtype=torch.int32, device=place), 16)


def require_no_trace(rows: int, count: int, longest: int, k: int, cut: kernel.Tuning, device: torch.device) -> None:
    """What lies behind the visible entries, and how much of it there is, is not in the choice."""
    scores = draw_scores(rows, count, device)
    visible = (count - 7 * torch.arange(rows)).to(torch.int32).to(device)
    wanted = run(scores, visible, k, cut)
    longer = torch.full((rows, longest), math.inf, device=device)
    longer[:, :count] = scores
    assert torch.equal(run(longer, visible, k, cut), wanted)


@pytest.mark.kernels
def test_columns_that_nobody_sees_change_no_choice(place: torch.device) -> None:
    for longest in (128, 640, 2048):  # one round, two, and four
        require_no_trace(3, 90, longest, 16, CUT, place)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [700, 1024, 8192])
def test_columns_that_nobody_sees_change_none_of_the_models_choices(count: int) -> None:
    for longest in (8192, 16_384, 65_536, 262_144):
        require_no_trace(8, count, longest, 512, kernel.TUNING, torch.device("cuda"))


@pytest.mark.kernels
def test_the_kernel_takes_numbers_of_every_size(place: torch.device) -> None:
    ends = torch.tensor([math.inf, -math.inf, 3e38, -3e38, 1e-45, -1e-45, 0.0, -0.0])
    scores = ends.repeat(1, 12).to(place)
    for k in (1, 5, 12, 13, 16):
        require_twin(scores, torch.tensor([96], dtype=torch.int32, device=place), k)


@pytest.mark.kernels
def test_the_kernel_refuses_by_name(place: torch.device) -> None:
    scores, visible = draw_scores(2, 64, place), torch.tensor([64, 3], dtype=torch.int32, device=place)
    few, none = kernel.Scratch.empty(1, 512, 4, place, CUT), kernel.Scratch(rounds=())
    many = draw_scores(2, 512, place)
    cases: list[tuple[Tensor, Tensor, int, dict[str, object], str]] = [
        (scores[0], visible, 4, {}, r"scores must be \[T, C\]"),
        (torch.zeros(4097, 64, device=place), visible, 4, {}, "scores must have 1 to 4096 rows; got 4097"),
        (torch.zeros(1, 1 << 21, device=place), visible, 4, {}, "scores must have 1 to 1048576 columns; got 2097152"),
        (scores.double(), visible, 4, {}, "scores must be torch.float32"),
        (scores[:, :32], visible, 4, {}, "scores must be contiguous"),
        (scores, visible.long(), 4, {}, "visible must be torch.int32"),
        (scores, visible[:1].clone(), 4, {}, "visible must have shape"),
        (scores, visible, 0, {}, "k must be 1 to 16; got 0"),
        (scores, visible, 17, {}, "k must be 1 to 16; got 17"),
        (many, visible, 4, {"scratch": few}, "scratch keys must have shape"),
        (many, visible, 4, {"scratch": none}, "scratch must be of 1 rounds; got 0"),
        (scores, visible, 4, {"out": torch.zeros(2, 4, device=place)}, "out must be torch.int32"),
    ]
    for bad, seen, k, more, named in cases:
        with pytest.raises(ValueError, match=named):
            kernel.launch(bad, seen, k, CUT, **more)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("count", [512, 4096, 16384, 65536, 262144])
def test_m28_the_models_entries_are_exact_and_each_rows_own(count: int) -> None:
    device = torch.device("cuda")
    scores = draw_scores(8, count, device)
    visible = (count - 100 * torch.arange(8)).clamp_min(3).to(torch.int32).to(device)
    require_twin(scores, visible, 512, kernel.TUNING)
    together = run(scores, visible, 512, kernel.TUNING)
    for row in range(8):
        alone = run(scores[row : row + 1].clone(), visible[row : row + 1].clone(), 512, kernel.TUNING)
        assert torch.equal(alone[0], together[row])
    chunk = run(scores.repeat(20, 1), visible.repeat(20), 512, kernel.TUNING)
    assert torch.equal(chunk, together.repeat(20, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_captured_choices_follow_their_inputs(rows: int) -> None:
    device = torch.device("cuda")
    scores, visible = draw_scores(rows, 16384, device), torch.full((rows,), 16384, dtype=torch.int32, device=device)
    scratch = kernel.Scratch.empty(rows, 16384, 512, device)
    outs = [torch.empty(rows, 512, dtype=torch.int32, device=device) for _ in range(3)]

    def chain(dependent: bool) -> None:
        for out in outs:
            kernel.top_entries(scores, visible, 512, scratch=scratch, out=out, dependent=dependent)

    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for turn in range(3):
        scores.copy_(scores.roll(1000 * turn + 1, 1))
        visible.sub_(turn * 997)
        expected = run(scores, visible, 512, kernel.TUNING)
        for _ in range(3):
            for out in outs:
                out.fill_(-9)
            graph.replay()
            assert all(torch.equal(out, expected) for out in outs)
