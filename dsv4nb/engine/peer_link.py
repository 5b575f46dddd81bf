"""The link of two GPUs, tested before an engine relies on it: bytes that are copied, and words that kernels push.

On some machines a copy between GPUs ends without an error and brings something else; an IOMMU between them that is set
wrongly does it. Nothing later would say so: the model would talk nonsense.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from dsv4nb.engine.graphs import Graphs
from dsv4nb.engine.pair_turns import on
from dsv4nb.errors import EngineError
from dsv4nb_kernels import peer_join
from dsv4nb_kernels._launch import ROWS_MAX
from dsv4nb_kernels._peer import Link, connect

GPU_BYTES = 32 << 20  # of a pattern: 80 us on a fast link
CPU_BYTES = 64 << 10
GPU_WIDTH, CPU_WIDTH = 4096, 256  # of a row that is joined
COPIES = 8  # that are timed
JOINS = 128  # that are timed, in a graph, where the host launches nothing between them

_PUSHED = {"0x55": 0x55555555, "0xAA": 0xAAAAAAAA - (1 << 32)}  # as float32 neither NaN nor zero


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLink:
    """Two GPUs of which each reads what the other one sends.

    Attributes:
        devices: the two.
        gb_s: of copies from the first to the second one, and back, in 1e9 bytes a second; None on a CPU.
        join_us: what a join of one row of 4096 takes; None on a CPU, and where they join nothing.
    """

    devices: tuple[torch.device, torch.device]
    gb_s: tuple[float, float] | None
    join_us: float | None

    def __str__(self) -> str:
        rates = "" if self.gb_s is None else "{:.0f} and {:.0f} GB/s there and back".format(*self.gb_s)
        return rates if self.join_us is None else f"{rates}, a join in {self.join_us:.1f} µs"


def sound_links(devices: Sequence[torch.device], *, joins: bool) -> tuple[PeerLink, ...]:
    """Test all that hand rows to each other, which are neighbours: none where there is one device.

    Args:
        devices: GPUs; or the CPU, as often as it stands for one.
        joins: test also that kernels on one push words into the other's memory, as two do that share every layer.

    Raises:
        EngineError: something did not arrive as it was sent.
        ValueError: two that join do not reach each other's memory.
    """
    with torch.inference_mode():
        links = tuple(_tested(first, second, joins=joins) for first, second in pairwise(devices))
    if links and devices[0].type == "cuda":
        torch.cuda.empty_cache()  # weights are going to need the room
    return links


def told(links: Sequence[PeerLink]) -> str:
    """Say how fast links are, "" where nothing was measured."""
    measured = [link for link in links if link.gb_s is not None]
    if len(measured) == 1:
        return str(measured[0])
    return "; ".join(f"{_names(link.devices)} {link}" for link in measured)


def _tested(first: torch.device, second: torch.device, *, joins: bool) -> PeerLink:
    is_cuda = first.type == "cuda"
    for source, target in ((first, second), (second, first)):
        _require_copies(source, target, GPU_BYTES if is_cuda else CPU_BYTES, alone=first.index or 0)
    rates = (_gb_s(first, second), _gb_s(second, first)) if is_cuda else None
    join_us = None
    if joins:
        width = GPU_WIDTH if is_cuda else CPU_WIDTH
        links = connect(width, (first, second))
        if is_cuda:
            _launch_alone(connect(width, (first, second), polls=1), width)
        for sender in (0, 1):
            _require_pushes(links, sender, width)
        join_us = _join_us(links, width) if is_cuda else None
    return PeerLink(devices=(first, second), gb_s=rates, join_us=join_us)


def _require_copies(source: torch.device, target: torch.device, nbytes: int, *, alone: int) -> None:
    way_out = f"A pipeline copies likewise. One GPU runs alone: devices={alone}"
    for (name, sent), (_, wanted) in zip(_copied(nbytes, source), _copied(nbytes, target), strict=True):
        found = torch.bitwise_not(wanted)  # nothing of it is right before
        _copy(sent, found)
        _require_same(found, wanted, f"{name}, copied from {_name(source)} to {_name(target)}", way_out)


def _require_pushes(links: tuple[Link, Link], sender: int, width: int) -> None:
    """Join rows of one side with zeros, which leaves their bits.

    Odd and even joins have words of their own: so that either side sends through both, patterns are odd in number.
    """
    devices = [link.mine.words.device for link in links]
    route = f"pushed from {_name(devices[sender])} to {_name(devices[1 - sender])}"
    way_out = f"placement='pipeline' pushes nothing; or one GPU runs alone: devices={devices[0].index or 0}"
    for (name, row), (_, other) in zip(*(_pushed(width, device) for device in devices), strict=True):
        wanted = (row, other)
        parts = [one if side == sender else torch.zeros_like(one) for side, one in enumerate(wanted)]
        sums = _join(parts, links)
        for link, device, found, sent in zip(links, devices, sums, wanted, strict=True):
            if link.has_failed:
                raise EngineError(
                    f"{_names(devices)} do not hear each other: {_name(device)} waited in vain for its part of"
                    f" {name}, {route}. {way_out}",
                    param="devices",
                )
            _require_same(_bytes(found), _bytes(sent), f"{name}, {route} and added on {_name(device)}", way_out)


def _require_same(found: Tensor, wanted: Tensor, what: str, way_out: str) -> None:
    if torch.equal(found, wanted):
        return
    place = int((found != wanted).nonzero()[0])
    raise EngineError(
        f"the link of the GPUs changes what it carries: of the pattern {what}, byte {place:,} is"
        f" 0x{int(found[place]):02X}, not 0x{int(wanted[place]):02X}. {way_out}",
        param="devices",
    )


def _copied(nbytes: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield patterns of so many bytes."""
    for name, byte in (("zeros", 0), ("ones", 0xFF), ("0x55", 0x55), ("0xAA", 0xAA)):
        yield name, torch.full((nbytes,), byte, dtype=torch.uint8, device=device)
    yield "ramp", _bytes(torch.arange(nbytes // 4, dtype=torch.int32, device=device))  # no two places are alike


def _pushed(width: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield patterns as rows that can be joined, [1, 8, D] float32."""
    for name, word in _PUSHED.items():
        words = torch.full((1, ROWS_MAX, width), word, dtype=torch.int32, device=device)
        yield name, words.view(torch.float32)
    ramp = torch.arange(1, ROWS_MAX * width + 1, dtype=torch.float32, device=device)
    yield "ramp", ramp.view(1, ROWS_MAX, width)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _join(parts: Sequence[Tensor], links: Sequence[Link]) -> list[Tensor]:
    """Return the sums that both sides have of their parts."""
    sums = [torch.empty(part.shape[1:], device=part.device) for part in parts]  # not while one side waits
    turns = list(zip(parts, links, sums, strict=True))
    if parts[0].is_cuda:
        for turn in turns:
            _launch(*turn)
        return sums
    for part, link, _ in turns:
        peer_join.launch(part, link, takes=False)
    return [peer_join.launch(part, link, out=out, pushes=False) for part, link, out in turns]


def _launch(part: Tensor, link: Link, out: Tensor) -> None:
    with on(part.device):
        peer_join.launch(part, link, out=out)


def _launch_alone(hasty: Sequence[Link], width: int) -> None:
    """Compile and load the kernel on both, so that neither does while the other one waits."""
    for link in hasty:
        device = link.mine.words.device
        _launch(torch.zeros(1, 1, width, device=device), link, torch.empty(1, width, device=device))
        torch.cuda.synchronize(device)


def _gb_s(source: torch.device, target: torch.device) -> float:
    sent, found = (torch.zeros(GPU_BYTES, dtype=torch.uint8, device=device) for device in (source, target))
    _copy(sent, found)
    with on(source):  # whose stream copies are on
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(COPIES):
            found.copy_(sent, non_blocking=True)
        stop.record()
        stop.synchronize()
    return COPIES * GPU_BYTES / float(start.elapsed_time(stop)) / 1e6


def _join_us(links: Sequence[Link], width: int) -> float:
    """Time joins of one row, by the clock of the first GPU."""
    sides = []
    for link in links:
        device = link.mine.words.device
        stream, held = torch.cuda.Stream(device), dict[object, torch.cuda.CUDAGraph]()
        rows = torch.zeros(1, 1, width, device=device), torch.empty(1, width, device=device)
        torch.cuda.synchronize(device)  # zeros are written on another stream
        with torch.cuda.device(device), torch.cuda.stream(stream):
            Graphs(device, is_on=True).capture(held, "joins", partial(_launch_joins, rows[0], link, rows[1]))
        sides.append((stream, held["joins"], rows))  # a graph holds no tensors

    def replay() -> None:
        for stream, graph, _ in sides:
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                graph.replay()

    replay()
    first = sides[0][0]
    with torch.cuda.device(first.device):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(first)
        replay()
        stop.record(first)
    for stream, _, _ in sides:
        stream.synchronize()
    return 1e3 * float(start.elapsed_time(stop)) / JOINS


def _launch_joins(part: Tensor, link: Link, out: Tensor) -> None:
    for _ in range(JOINS):
        _launch(part, link, out)


def _bytes(values: Tensor) -> Tensor:
    return values.flatten().view(torch.uint8)


def _name(device: torch.device) -> str:
    return f"GPU {device.index}" if device.type == "cuda" else str(device)


def _names(devices: Sequence[torch.device]) -> str:
    return " and ".join(map(_name, devices))
