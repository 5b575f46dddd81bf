"""The choice by peaks: the kernels against the twin, on every way through them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import _sifted, top_entries
from dsv4nb_kernels.reference.top_entries import peaks
from dsv4nb_kernels.reference.top_entries import top_entries as twin

CUT = _sifted.Cut(block=128, spare=2, few=4, warps=4)


def peaks_of(scores: Tensor, visible: Tensor) -> Tensor:
    """As `index_scores` leaves them; NaN of groups that no row needs."""
    found = peaks(scores, visible)
    seen = peaks(torch.zeros_like(scores), visible) == 0
    return found.masked_fill(~seen, math.nan)


def run(scores: Tensor, visible: Tensor, k: int, cut: _sifted.Cut = CUT) -> Tensor:
    """Holds the kernels to their own rows and to every element of them."""
    rows, count = scores.shape
    room = torch.full(((rows + 1) * k + 64,), -7, dtype=torch.int32, device=scores.device)
    out = room[: rows * k].view(rows, k)
    own = peaks_of(scores, visible)
    scratch = top_entries.Scratch.empty(rows, count, k, scores.device, cut)
    assert scratch.sifted is not None
    for left in (scratch.sifted.keys, scratch.sifted.entries, scratch.sifted.counts):
        left.fill_(0x7FFFFFF0)
    top_entries.launch(
        scores, visible, k, top_entries.TUNING, peaks=own, sifting=cut, scratch=scratch, out=out, dependent=False
    )
    assert (room[rows * k :] == -7).all()
    return out


def require_twin(scores: Tensor, visible: Tensor, k: int, cut: _sifted.Cut = CUT) -> None:
    assert torch.equal(run(scores, visible, k, cut).cpu().long(), twin(scores.cpu(), visible.cpu().long(), k))


def draw(kind: str, rows: int, count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(count + rows)
    scores = torch.randn(rows, count, generator=generator) * 3
    match kind:
        case "ties":
            scores = scores.round()
        case "neighbours":
            scores[:, count // 3 : count // 3 + 40] += 50
        case "many neighbours":
            scores[:, count // 4 : count // 2] += 50
        case "equal":
            scores = torch.zeros(rows, count) * scores.sign()
        case "one":
            scores = torch.full((rows, count), -3e38)
            scores[:, count // 2] = math.inf
    return scores.to(device)


KINDS = ("normal", "ties", "neighbours", "many neighbours", "equal", "one")


@pytest.mark.kernels
@pytest.mark.parametrize("kind", KINDS)
def test_m28_the_choice_by_peaks_is_the_twins(kind: str, place: torch.device) -> None:
    scores = draw(kind, 4, 2048, place)
    visible = torch.tensor([2048, 2047, 1027, 300], dtype=torch.int32, device=place)
    for row, seen in enumerate(visible.tolist()):
        scores[row, seen:] = (math.inf, math.nan)[row % 2]
    require_twin(scores, visible, 16)


@pytest.mark.kernels
@pytest.mark.parametrize("seen", [0, 1, 15, 16, 17, 128, 129])
def test_few_visible_entries_are_all_taken(seen: int, place: torch.device) -> None:
    require_twin(draw("normal", 1, 1152, place), torch.tensor([seen], dtype=torch.int32, device=place), 16)


@pytest.mark.kernels
def test_blocks_that_may_keep_little_and_a_last_program_that_holds_little(place: torch.device) -> None:
    small = _sifted.Cut(block=64, spare=1, few=2, slack=1, warps=4)
    for kind in KINDS:
        scores = draw(kind, 2, 2304, place)  # blocks beyond the sixteen that are looked at together
        require_twin(scores, torch.tensor([2304, 2100], dtype=torch.int32, device=place), 8, small)


@pytest.mark.kernels
@pytest.mark.parametrize("count", [2048, 2304, 1920])
def test_peaks_of_several_groups_are_one_where_there_are_many(
    count: int, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sifted, "PEAKS", 64)
    visible = torch.tensor([count, count // 2 + 9], dtype=torch.int32, device=place)
    for kind in ("normal", "neighbours"):
        require_twin(draw(kind, 2, count, place), visible, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [16_384, 35_072, 65_536, 262_144])
@pytest.mark.parametrize("kind", KINDS)
def test_m28_the_models_entries_are_exact_and_each_rows_own(kind: str, count: int) -> None:
    device = torch.device("cuda")
    scores = draw(kind, 8, count, device)
    visible = (count - 100 * torch.arange(8)).to(torch.int32).to(device)
    visible[5] = count // 2 + 1
    visible[6] = 700
    require_twin(scores, visible, 512, _sifted.CUT)
    together = run(scores, visible, 512, _sifted.CUT)
    for row in range(8):
        alone = run(scores[row : row + 1].clone(), visible[row : row + 1].clone(), 512, _sifted.CUT)
        assert torch.equal(alone[0], together[row])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6])
def test_captured_choices_follow_their_inputs(rows: int) -> None:
    device, count = torch.device("cuda"), 35_072
    scores = draw("normal", rows, count, device)
    visible = torch.full((rows,), count, dtype=torch.int32, device=device)
    own = peaks_of(scores, visible)
    scratch = top_entries.Scratch.empty(rows, count, 512, device, _sifted.CUT)
    outs = [torch.empty(rows, 512, dtype=torch.int32, device=device) for _ in range(3)]

    def chain() -> None:
        for out in outs:
            top_entries.top_entries(scores, visible, 512, peaks=own, scratch=scratch, out=out, dependent=True)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for turn in range(3):
        scores.copy_(scores.roll(1000 * turn + 1, 1))
        visible.sub_(turn * 997)
        own.copy_(peaks_of(scores, visible))
        expected = twin(scores.cpu(), visible.cpu().long(), 512)
        for _ in range(3):
            for out in outs:
                out.fill_(-9)
            graph.replay()
            assert all(torch.equal(out.cpu().long(), expected) for out in outs)
