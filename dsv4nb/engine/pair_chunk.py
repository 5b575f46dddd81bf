"""Chunks of a prompt on two GPUs that share the weights, from one thread; see `rank_chunk`.

Both run every layer with their halves, and after every sublayer each holds one part of a sum. A join copies each GPU's
part to the other one; then both add the parts in the order of the ranks, in the kernel that mixes them into the
streams. The sum is rounded there to bfloat16, not the parts, so they move as float32: 4·T·D bytes each way at a join,
33,554,432 of 2,048 rows of V4-Flash, and at all joins of such a chunk 2.85 GB each way.

No kernel waits for the other GPU. Streams wait for events, and an event that nobody has recorded yet would hold up
nothing: so a join comes when the kernels of both parts are launched, and records both events before either is waited
for. Between streams S0, S1 of the GPUs and streams C0, C1, on which a GPU's own part is copied away, join n is

    S0: part 0, record ready0;  S1: part 1, record ready1
    C0: wait ready0, ready1, copy part 0 to GPU 1, record copied0;  S1: wait copied0
    C1: wait ready0, ready1, copy part 1 to GPU 0, record copied1;  S0: wait copied1

and S0 and S1 go on to add. What comes into memory of GPU 0 is behind ready0, so behind all that S0 did there. What S0
writes could be too early for C0 alone: so parts lie in two pieces of memory that take turns from join to join. When S0
writes the piece of join n again, behind join n + 1, it has waited there for copied1, which was behind ready1, which S1
recorded behind its wait for copied0 of join n: part 0 has been read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4nb.engine.device_caches import Caches
from dsv4nb.engine.pair_turns import on, take_turns
from dsv4nb.engine.rank_chunk import RankChunk


class PairChunk:
    """Runs chunks of prompts through two ranks' halves; a CPU may stand for both GPUs.

    Args:
        sides: of both ranks, the first one first.

    Attributes:
        most: rows of the longest chunk.
    """

    def __init__(self, sides: tuple[RankChunk, RankChunk]) -> None:
        self._sides, self._devices = sides, [side.device for side in sides]
        self._exchange = Exchange(self._devices)
        self.most = sides[0].most

    @property
    def nbytes(self) -> tuple[int, ...]:
        """What chunks take on each GPU, as `RankChunk` says it."""
        return tuple(nbytes for side in self._sides for nbytes in side.nbytes)

    def run(self, caches: Caches, tokens: Sequence[int], pos: int, *, has_head: bool) -> npt.NDArray[np.float32] | None:
        """Run `tokens` at positions pos …, as `RankChunk` does: [1, V] with a head."""
        halves = list(zip(self._sides, caches.copies, strict=True))
        rows = self._sides[0].rows_of(caches, len(tokens), pos)
        for side in self._sides:
            with on(side.device):
                side.begin(tokens, pos, rows)
        turns = [side.replays(own, rows, pos, has_head=has_head) for side, own in halves]
        take_turns(self._devices, turns, self._join)
        ends = []
        for side in self._sides:
            with on(side.device):
                ends.append(side.end(has_head=has_head))
        found = [logits for logits in ends if logits is not None]
        return np.concatenate(found, 1) if found else None

    def _join(self, parts: Sequence[Tensor]) -> None:
        self._exchange.join(parts)
        for side in self._sides:
            side.outputs.pass_on()


class Exchange:
    """Brings the parts of a sum to the GPU that lacks them; a CPU copies them at once."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._ends = [_End(device) for device in devices]

    def join(self, parts: Sequence[Tensor]) -> None:
        """Launch the copies of a join; what is launched behind it on the GPUs' current streams finds both parts.

        Args:
            parts: of each GPU, [2, T, D] with its own part in place, launched on its current stream.
        """
        for end in self._ends:
            end.record()
        for source, target in ((0, 1), (1, 0)):
            self._ends[source].send(parts[source][source], parts[target][source], self._ends[target])


class _End:
    """One GPU of an exchange."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        if self._is_cuda:
            self._copies = torch.cuda.Stream(device)
            self._ready, self._copied = torch.cuda.Event(), torch.cuda.Event()

    def record(self) -> None:
        """Note that everything launched so far makes the part of the next `send`."""
        if self._is_cuda:
            self._ready.record(torch.cuda.current_stream(self._device))

    def send(self, part: Tensor, room: Tensor, other: _End) -> None:
        """Launch the copy of this GPU's part, which lets the other one wait for it."""
        if not self._is_cuda:
            room.copy_(part)
            return
        for end in (self, other):
            self._copies.wait_event(end._ready)
        # torch copies on the source's current stream; on the one of the kernels the two copies would follow each other
        with torch.cuda.stream(self._copies):
            room.copy_(part, non_blocking=True)
        self._copied.record(self._copies)
        torch.cuda.current_stream(other._device).wait_event(self._copied)
