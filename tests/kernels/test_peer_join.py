"""Both GPUs' halves: the twin, and the kernel with the GPUs emulated one after the other, and on a pair."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from dsv4nb_kernels import hyper_mix, peer_join
from dsv4nb_kernels._peer import CHANNELS, Link, connect
from dsv4nb_kernels.reference.peer_join import peer_join as twin

T = TypeVar("T")
WIDTH = 2 * CHANNELS
FEW = 3  # looks at the words, where nobody will write them
PATIENCE = 10.0  # seconds within which a join on a GPU has given up


def test_adds_each_side_from_left_to_right_and_then_the_sides() -> None:
    big, one = torch.full((1, 1), 1e8), torch.ones(1, 1)
    assert twin(torch.stack((big, -big)), torch.stack((one, one))).item() == 2.0
    assert twin(torch.stack((big, one)), torch.stack((one, -big))).item() == 0.0


def draw(splits: int, rows: int, width: int, device: torch.device, seed: int) -> Tensor:
    """Parts that cancel, so that another order of a sum shows."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(splits, rows, width, generator=generator) * torch.exp2(torch.arange(rows) * 3.0 - 6)[:, None]
    if splits > 1:
        parts[1] -= parts[0]
    return parts.to(device)


def join_in_turn(halves: tuple[Tensor, Tensor], links: tuple[Link, Link]) -> list[Tensor]:
    """Each GPU's push, then each GPU's take; holds the kernel to its own rows and to every element of them."""
    outs = []
    for parts, link in zip(halves, links, strict=True):
        peer_join.launch(parts, link, takes=False)
    for parts, link in zip(halves, links, strict=True):
        room = torch.full((parts.shape[1] + 2, parts.shape[2]), torch.nan, device=parts.device)
        peer_join.launch(parts, link, out=room[1:-1], pushes=False)
        assert room[0].isnan().all() and room[-1].isnan().all()
        outs.append(room[1:-1])
    return outs


def pair_on_one(device: torch.device) -> tuple[Link, Link]:
    """Both ends on one device."""
    return connect(WIDTH, (device, device), polls=FEW)


@pytest.mark.kernels
def test_joins_of_changing_width_give_both_sides_the_twins_bits(place: torch.device) -> None:
    links = pair_on_one(place)
    for turn, (splits, rows) in enumerate(((1, 1), (3, 2), (4, 1), (2, 3), (1, 2))):
        halves = (
            draw(splits, rows, WIDTH, place, turn),
            draw(splits, rows, WIDTH, place, 99),
        )
        outs = join_in_turn(halves, links)
        assert all(torch.equal(out, twin(*halves)) for out in outs)
    assert not any(link.has_failed for link in links)
    assert links[0].mine.counts[:, 0].tolist() == [5, 3, 1, 0, 0, 0, 0, 0]


@pytest.mark.kernels
def test_a_side_may_be_one_join_ahead(place: torch.device) -> None:
    early, late = pair_on_one(place)
    halves = [(draw(1, 1, WIDTH, place, turn), draw(1, 1, WIDTH, place, 9 + turn)) for turn in range(3)]
    peer_join.launch(halves[0][0], early, takes=False)
    for turn in range(2):
        peer_join.launch(halves[turn][1], late, takes=False)
        peer_join.launch(halves[turn][0], early, pushes=False)
        peer_join.launch(halves[turn + 1][0], early, takes=False)
        assert torch.equal(peer_join.launch(halves[turn][1], late, pushes=False), twin(*halves[turn]))
    assert not early.has_failed and not late.has_failed


@pytest.mark.kernels
def test_m28_a_row_of_a_join_is_the_row_alone(place: torch.device) -> None:
    halves = tuple(draw(3, 3, WIDTH, place, seed) for seed in range(2))
    together = join_in_turn((halves[0], halves[1]), pair_on_one(place))
    for row in range(3):
        one, other = (half[:, row : row + 1].contiguous() for half in halves)
        alone = join_in_turn((one, other), pair_on_one(place))
        assert all(torch.equal(a[0], t[row]) for a, t in zip(alone, together, strict=True))


@pytest.mark.kernels
def test_a_missing_push_leaves_an_error_and_no_number_that_looks_like_a_sum(place: torch.device) -> None:
    links = pair_on_one(place)
    halves = draw(2, 2, WIDTH, place, 0), draw(2, 2, WIDTH, place, 1)
    join_in_turn(halves, links)
    peer_join.launch(halves[0], links[0], takes=False)
    links[1].mine.words[0, 1, CHANNELS + 7] = 0  # one word of the second join is lost
    out = peer_join.launch(halves[1], links[1], pushes=False)
    assert links[1].has_failed and not links[0].has_failed
    assert out.isnan().nonzero().tolist() == [[1, CHANNELS + 7]]
    late = peer_join.launch(halves[1], replace(links[1], polls=1 << 30), pushes=False)  # does not wait again
    assert late.isnan().all()


@pytest.mark.kernels
def test_a_boundary_takes_the_other_half_as_a_join_before_it_would(place: torch.device) -> None:
    rows, splits = 2, 2
    links, weights = pair_on_one(place), draw_weights(place)
    halves = draw(splits, rows, WIDTH, place, 0), draw(splits, rows, WIDTH, place, 1)
    expected = mix(twin(*halves)[None], weights, None)
    for parts, link in zip(halves, links, strict=True):
        peer_join.launch(parts, link, takes=False)
    for parts, link in zip(halves, links, strict=True):
        out = mix(parts, weights, link)
        assert torch.equal(out.stream, expected.stream) and torch.equal(out.x, expected.x)
    assert not any(link.has_failed for link in links)


def draw_weights(device: torch.device, width: int = WIDTH) -> hyper_mix.HyperWeights:
    n = hyper_mix.STREAMS
    return hyper_mix.HyperWeights(
        fn=draw(1, n, 4 * width, device, 3)[0] * width**-0.5,
        scale=torch.ones(n, device=device),
        base=torch.zeros(n, device=device),
        norm=torch.ones(width, device=device),
    )


def mix(y: Tensor, weights: hyper_mix.HyperWeights, link: Link | None, *, pushed: bool = True) -> hyper_mix.Boundary:
    rows, width = y.shape[1:]
    before = hyper_mix.Boundary.empty(rows, width, y.device)
    for given in (before.stream, before.post, before.comb):
        given.copy_(draw(1, 1, given.numel(), y.device, 7).view(given.shape))
    return hyper_mix.hyper_mix(
        y, before.stream, before, weights, iterations=1, hc_eps=1e-6, norm_eps=1e-6, act_fp8=True, link=link,
        pushed=pushed and link is not None,
    )  # fmt: skip


@pytest.mark.kernels
def test_refuses_by_name(place: torch.device) -> None:
    weights = draw_weights(place)
    link, parts = pair_on_one(place)[0], draw(2, 2, WIDTH, place, 0)
    wide = draw(2, 2, 2 * WIDTH, place, 0)
    many = draw(1, 9, WIDTH, place, 0)
    short = replace(link, theirs=replace(link.theirs, words=link.theirs.words[:1]))
    refusals: list[tuple[Callable[[], object], str]] = [
        (lambda: connect(WIDTH + 8, (place, place)), "width must be a multiple of 256"),
        (lambda: peer_join.peer_join(parts[0], link), r"parts must be \[S, T, D\]"),
        (lambda: peer_join.peer_join(many, link), "parts must have 1 to 8 rows"),
        (lambda: peer_join.peer_join(parts.double(), link), "parts must be torch.float32"),
        (lambda: peer_join.peer_join(parts, link, out=wide[0]), "out must have shape"),
        (lambda: peer_join.peer_join(wide, link), r"link\.mine\.words must have shape"),
        (lambda: peer_join.peer_join(parts, short), r"link\.theirs\.words must have shape"),
        (lambda: peer_join.peer_join(parts, replace(link, polls=0)), "polls must be positive"),
        (lambda: mix(many, weights, link), "at most 8 rows for `link`"),
    ]
    if place.type == "cpu":
        refusals.append((lambda: mix(parts, weights, link, pushed=False), "pushed must be true"))
    for refused, message in refusals:
        with pytest.raises(ValueError, match=message):
            refused()


PAIR = torch.device("cuda", 0), torch.device("cuda", 1)
MODEL = 4096


def on_both(run: Callable[[int], T]) -> list[T]:
    results = []
    for rank, place in enumerate(PAIR):
        with torch.cuda.device(place):
            results.append(run(rank))
    return results


def wait_for_both() -> None:
    for place in PAIR:
        torch.cuda.synchronize(place)


def warm_pair(run: Callable[[int, Link], object]) -> tuple[Link, Link]:
    """Compile and load on both GPUs with joins that give up at once, then connect anew."""
    hasty = connect(MODEL, PAIR, polls=1)
    on_both(lambda rank: run(rank, hasty[rank]))
    wait_for_both()
    return connect(MODEL, PAIR)


@pytest.mark.gpu2
@pytest.mark.parametrize("rows", [1, 6, 8])
@pytest.mark.parametrize("splits", [1, 4])
def test_captured_joins_follow_their_inputs_on_a_pair(rows: int, splits: int) -> None:
    halves = [draw(splits, rows, MODEL, place, rank) for rank, place in enumerate(PAIR)]
    outs = [torch.empty(5, rows, MODEL, device=place) for place in PAIR]
    links = warm_pair(lambda rank, link: peer_join.peer_join(halves[rank], link, out=outs[rank][0], dependent=True))
    graphs = []
    for rank, place in enumerate(PAIR):
        with torch.cuda.device(place):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], stream=torch.cuda.Stream(place)):
                for out in outs[rank]:
                    peer_join.peer_join(halves[rank], links[rank], out=out, dependent=True)
    for turn in range(4):
        for half in halves:
            half.copy_(half.roll(turn + 1, 2) * -1.5)
        exact = twin(*(half.cpu() for half in halves))
        wait_for_both()
        for _ in range(50):
            for rank in (0, 1) if turn % 2 else (1, 0):
                graphs[rank].replay()
        wait_for_both()
        assert not any(link.has_failed for link in links)
        for out in outs:
            assert all(torch.equal(each, exact) for each in out.cpu())
            out.fill_(torch.nan)


@pytest.mark.gpu2
def test_m28_rows_of_one_to_eight_are_the_row_alone_on_a_pair() -> None:
    halves = [draw(4, 8, MODEL, place, rank) for rank, place in enumerate(PAIR)]
    links = warm_pair(lambda rank, link: peer_join.peer_join(halves[rank], link))

    def joined(rows: list[int]) -> Tensor:
        parts = [half[:, rows].contiguous() for half in halves]
        wait_for_both()
        outs = on_both(lambda rank: peer_join.peer_join(parts[rank], links[rank]))
        wait_for_both()
        assert torch.equal(outs[0].cpu(), outs[1].cpu())
        return outs[0].cpu()

    alone = [joined([row])[0] for row in range(8)]
    for batch in ([*(list(range(rows)) for rows in range(2, 9))], [[5, 3, 0, 7, 1, 6]]):
        for rows in batch:
            assert all(torch.equal(out, alone[row]) for out, row in zip(joined(rows), rows, strict=True))
    assert not any(link.has_failed for link in links)


@pytest.mark.gpu2
def test_a_missing_push_ends_in_bounded_time_on_a_pair() -> None:
    parts = draw(1, 6, MODEL, PAIR[0], 0)
    links = warm_pair(lambda rank, link: peer_join.peer_join(parts.to(PAIR[rank]), link))
    began = time.monotonic()
    with torch.cuda.device(PAIR[0]):
        out = peer_join.peer_join(parts, links[0])
    torch.cuda.synchronize(PAIR[0])
    first = time.monotonic() - began
    assert links[0].has_failed and out.isnan().all() and not links[1].has_failed
    began = time.monotonic()
    for _ in range(100):
        peer_join.peer_join(parts, links[0], out=out)
    torch.cuda.synchronize(PAIR[0])
    rest = time.monotonic() - began
    print(f"gave up after {first:.2f} s, then {rest * 1e4:.0f} us a join")
    assert 0.1 < first < PATIENCE and rest < first and math.isnan(out[0, 0].item())


@pytest.mark.gpu2
@pytest.mark.parametrize("rows", [1, 6])
def test_a_boundary_on_a_pair_equals_a_join_before_it(rows: int) -> None:
    halves = [draw(4, rows, MODEL, place, rank) for rank, place in enumerate(PAIR)]
    weights = [draw_weights(place, MODEL) for place in PAIR]
    links = warm_pair(lambda rank, link: mix(halves[rank], weights[rank], link, pushed=False))
    with torch.cuda.device(PAIR[0]):
        expected = mix(twin(*(half.cpu() for half in halves)).to(PAIR[0])[None], weights[0], None)
    for _ in range(3):
        wait_for_both()
        outs = on_both(lambda rank: mix(halves[rank], weights[rank], links[rank], pushed=False))
        wait_for_both()
        for out in outs:
            assert torch.equal(out.stream.cpu(), expected.stream.cpu()) and torch.equal(out.x.cpu(), expected.x.cpu())
    assert not any(link.has_failed for link in links)
