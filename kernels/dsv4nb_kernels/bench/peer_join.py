"""The join of two GPUs' halves, alone, and in the boundary that follows it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import hyper_mix, peer_join
from dsv4nb_kernels._peer import POLLS, Link, connect
from dsv4nb_kernels.bench._driver import Arm, Launch
from dsv4nb_kernels.reference.peer_join import peer_join as twin

OP = "peer_join"
HIDDEN, ITERATIONS, EPS = 4096, 20, 1e-6
PAIR = torch.device("cuda", 0), torch.device("cuda", 1)
# parts of each GPU, and whether a boundary follows
SHAPES = {"1 part": (1, False), "4 parts": (4, False), "boundary": (4, True)}
ROWS = (1, 2, 4, 6)
COPIES = 8  # of the boundary's weights


def arms(device: torch.device) -> list[Arm]:
    """Return the product on every shape and T, and the boundary with its join in a kernel of its own and without."""
    return [arm for shape in SHAPES for rows in ROWS for arm in _own(device, shape, rows)]


def _own(device: torch.device, shape: str, rows: int) -> Iterator[Arm]:
    splits, has_boundary = SHAPES[shape]
    names = ("inside", "apart", "no join") if has_boundary else ("dependent", "not dependent")
    for name in names:
        yield Arm(
            op=OP,
            shape=shape,
            rows=rows,
            name=name,
            bytes_read=8 * rows * HIDDEN,
            make=partial(_make, shape, rows, name),
            compile=partial(_compile, splits, name),
            check=partial(_check, splits, rows),
            is_product=name == names[0],
            copies=COPIES,
            is_pair=True,
        )


def _compile(splits: int, name: str) -> None:
    f32, i32, i64, dependent = torch.float32, torch.int32, torch.int64, name != "not dependent"
    peer_join._peer_join_kernel.warmup(
        f32, i64, i64, i32, i32, f32, 1, 1, grid=(1,), num_warps=peer_join.WARPS, launch_pdl=dependent,
        **peer_join.constants(HIDDEN, splits, dependent=dependent),
    )  # fmt: skip


def _parts(splits: int, rows: int, rank: int) -> Tensor:
    generator = torch.Generator(PAIR[rank]).manual_seed(rank)
    return torch.randn(splits, rows, HIDDEN, generator=generator, device=PAIR[rank])


def _make(shape: str, rows: int, name: str, count: int) -> Launch:
    splits, has_boundary = SHAPES[shape]
    side = _boundary if has_boundary else _alone
    # first with joins that give up at once: nobody may wait for a kernel that is still being compiled
    for polls in (1, POLLS):
        links = connect(HIDDEN, PAIR, polls=polls)
        launches = [side(rank, splits, rows, name, count, links[rank]) for rank in range(2)]
        if polls == 1:
            for place, launch in zip(PAIR, launches, strict=True):
                with torch.cuda.device(place):
                    launch(0)
        for place in PAIR:
            torch.cuda.synchronize(place)
    return lambda i: launches[torch.cuda.current_device()](i)


def _alone(rank: int, splits: int, rows: int, name: str, count: int, link: Link) -> Launch:
    parts, out = _parts(splits, rows, rank), torch.empty(rows, HIDDEN, device=PAIR[rank])
    return lambda i: peer_join.peer_join(parts, link, out=out, dependent=name == "dependent")


def _boundary(rank: int, splits: int, rows: int, name: str, count: int, link: Link) -> Launch:
    device, n = PAIR[rank], hyper_mix.COEFFICIENTS
    parts, joined = _parts(splits, rows, rank), torch.empty(1, rows, HIDDEN, device=device)
    fn = torch.randn(count, n, hyper_mix.STREAMS * HIDDEN, device=device) * HIDDEN**-0.5
    ones, norm = torch.ones(n, device=device), torch.ones(HIDDEN, device=device)
    weights = [hyper_mix.HyperWeights(fn=fn[i], scale=ones, base=ones, norm=norm) for i in range(count)]
    before = hyper_mix.Boundary.empty(rows, HIDDEN, device)
    for given in (before.post, before.comb, before.stream):
        given.fill_(0.25)
    out = hyper_mix.Boundary.empty(rows, HIDDEN, device)

    def launch(i: int) -> object:
        y = parts
        if name == "apart":
            peer_join.peer_join(parts, link, out=joined[0], dependent=True)
            y = joined
        return hyper_mix.hyper_mix(
            y, before.stream, before, weights[i % count], iterations=ITERATIONS, hc_eps=EPS, norm_eps=EPS, act_fp8=True,
            out=out, dependent=True, link=link if name == "inside" else None,
        )  # fmt: skip

    return launch


def _check(splits: int, rows: int) -> None:
    exact = twin(*(_parts(splits, rows, rank).cpu() for rank in range(2)))
    for polls in (1, POLLS):
        links = connect(HIDDEN, PAIR, polls=polls)
        halves = [_parts(splits, rows, rank) for rank in range(2)]
        outs = []
        for place, parts, link in zip(PAIR, halves, links, strict=True):
            with torch.cuda.device(place):
                outs.append(peer_join.peer_join(parts, link))
        for place in PAIR:
            torch.cuda.synchronize(place)
    assert not any(link.has_failed for link in links), "a join that gave up"
    assert all(torch.equal(out.cpu(), exact) for out in outs), "another sum than the twin's"
