"""DeviceState and DeviceSnapshot: one sequence on the GPUs, and one position of it.

A state has caches of its own, as large as the extent that it is in, and moves to larger ones at its end. They go back
to the engine's shelf when it has left them, is released or is forgotten; captured graphs stay with them. A snapshot is
a copy of what later positions can see, entries included.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine.cache import Part
from dsv4nb.engine.checks import require_arrays
from dsv4nb.engine.device_caches import Caches, Share, blocks_of, device_parts, dtype_of, read_part, write_part
from dsv4nb.engine.extent import extent_of

KEPT_BYTES = 4 << 30  # of caches that nobody holds: those of a few chats of 128K positions

_DUMPED: dict[torch.dtype, type[Any]] = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    torch.uint8: np.uint8,
}

MakeContext = Callable[[Caches, int, int], None]  # launches the context rows of positions first … stop - 1


class Shelf:
    """The caches of an engine that no state holds, and how new ones are made.

    Any thread may give caches back; the engine's alone takes and frees them.

    Args:
        shares: of the GPUs.
        make_context: of the drafter; None without one.

    Attributes:
        kv_fp8: whether key/value rows are records.
        made: caches that exist, held or not, by the positions that they have room for.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_seq: int,
        shares: Sequence[Share],
        make_context: MakeContext | None = None,
    ) -> None:
        self.config, self.make_context = config, make_context
        self.max_seq, self.shares = max_seq, tuple(shares)
        self.kv_fp8 = shares[0].kv_fp8
        self._free: deque[Caches] = deque()
        self.made: Counter[int] = Counter()

    @property
    def has_drafter(self) -> bool:
        return self.make_context is not None

    def take(self, positions: int) -> Caches:
        """Return caches of the extent that holds so many positions, with anything finite in them.

        Raises:
            torch.OutOfMemoryError: there is no room for more.
        """
        size = self.size_of(positions)
        for caches in reversed(tuple(self._free)):
            if caches.positions == size:
                self._free.remove(caches)
                return caches
        self.trim()
        made = self._make(size)
        self.made[size] += 1
        return made

    def size_of(self, positions: int) -> int:
        """Return the positions of the extent that holds so many."""
        return extent_of(positions, self.max_seq)

    def idle(self) -> list[int]:
        """Return the positions of all caches that nobody holds; from any thread."""
        return [caches.positions for caches in tuple(self._free)]

    def home(self, part: Part) -> Share:
        """Return where copies of `part` are: on the first GPU that holds it."""
        return next(share for share in self.shares if share.holds(part))

    def put(self, caches: Caches) -> None:
        """Take caches back; from any thread."""
        self._free.append(caches)

    def trim(self) -> None:
        """Free what was given back first, where more is here than is kept."""
        self._free_until(KEPT_BYTES)

    def clear(self) -> None:
        """Free the caches that nobody holds."""
        self._free_until(0)

    def _make(self, size: int) -> Caches:
        try:
            return Caches.on(self.config, size, self.shares)
        except torch.OutOfMemoryError:
            if not self._free:
                raise
        # what the attempt took went with its error
        self.clear()
        return Caches.on(self.config, size, self.shares)

    def _free_until(self, kept: int) -> None:
        left = sum(copy.nbytes for caches in tuple(self._free) for copy in caches.copies)
        while left > kept:
            caches = self._free.popleft()
            left -= sum(copy.nbytes for copy in caches.copies)
            self.made[caches.positions] -= 1


class DeviceState:
    """One sequence on the GPU.

    Attributes:
        shelf: where its caches are from.
        pos: committed positions.
        pending: rows of the last forward, provisional until `commit`.
        context: the drafter's rows of the window's positions below it are there; never past the committed ones.
    """

    def __init__(self, shelf: Shelf, pos: int = 0) -> None:
        self.shelf, self.pos, self.pending, self.context = shelf, pos, 0, pos
        self._caches: Caches | None = None
        self._hold(shelf.take(pos))

    @property
    def is_released(self) -> bool:
        return self._caches is None

    @property
    def caches(self) -> Caches:
        """Its caches; it was not released."""
        assert self._caches is not None
        return self._caches

    @property
    def blocks(self) -> int:
        """Blocks of entries that are in use."""
        return 0 if self.is_released else blocks_of(self.shelf.config, self.pos)

    def release(self) -> None:
        """Give the caches back; idempotent."""
        self._caches, self.pending = None, 0
        self._give_back()

    def grow(self, positions: int) -> None:
        """Launch the move to caches with room for so many positions, where its own have less.

        Raises:
            torch.OutOfMemoryError: there is no room for them; nothing was changed.
        """
        if positions <= self.caches.positions:
            return
        larger = self.shelf.take(positions)
        larger.fill(self.caches)
        self._give_back()
        self._hold(larger)
        self.shelf.trim()

    def _hold(self, caches: Caches) -> None:
        self._caches = caches
        self._give_back = weakref.finalize(self, self.shelf.put, caches)
        self._give_back.atexit = False

    def commit(self, n: int) -> None:
        """Keep the first `n` rows that were run since the last commit."""
        self.pos += n
        self.pending = 0

    def catch_up(self) -> None:
        """Launch the drafter's rows of committed positions that are not there yet; nothing without a drafter."""
        first = max(self.context, self.pos - self.shelf.config.sliding_window)
        if self.shelf.make_context is not None and first < self.pos:
            self.shelf.make_context(self.caches, first, self.pos)
        self.context = self.pos

    def live(self) -> Iterator[tuple[Part, Tensor]]:
        """Yield every cached value that a later position can see, copied, in a fixed order."""
        self.catch_up()
        for part, buffer in self.caches.parts(self.pos):
            yield part, read_part(buffer, part)

    def digest(self) -> str:
        """Return the SHA-256 of the position and all live values: equal states, equal digests. It waits for the GPU."""
        self.catch_up()
        for device in self.caches.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        hasher = hashlib.sha256(f"pos {self.pos}\n".encode())
        for part, rows in self.live():
            hasher.update(f"{part.name} {tuple(rows.shape)}\n".encode())
            hasher.update(to_array(rows).tobytes())
        return hasher.hexdigest()


class DeviceSnapshot:
    """One position of a sequence.

    Attributes:
        shelf: of the state it was taken from.
        parts: copies of the live rows, in order; none once it is released.
    """

    def __init__(self, shelf: Shelf, pos: int, parts: list[tuple[Part, Tensor]]) -> None:
        self.shelf, self.parts = shelf, parts
        self._pos = pos
        self._nbytes = sum(rows.nbytes for _, rows in parts)

    @property
    def pos(self) -> int:
        return self._pos

    @property
    def nbytes(self) -> int:
        """Everything it holds: nothing is shared."""
        return self._nbytes

    @property
    def is_released(self) -> bool:
        return not self.parts

    @property
    def blocks(self) -> int:
        """Blocks of entries that its copies fill."""
        return 0 if self.is_released else blocks_of(self.shelf.config, self._pos)

    def release(self) -> None:
        """Give the copies back; idempotent, from any thread."""
        self.parts = []


def restore(snapshot: DeviceSnapshot) -> DeviceState:
    """Make a state that goes on from `snapshot`."""
    state = DeviceState(snapshot.shelf, snapshot.pos)
    held = {part.name: rows for part, rows in snapshot.parts}
    for caches in state.caches.copies:
        for part, buffer in caches.parts(state.pos):
            write_part(buffer, part, held[part.name].to(buffer.device))
    return state


def dump(snapshot: DeviceSnapshot) -> dict[str, npt.NDArray[Any]]:
    """Return the live values by name, [rows, width]: bfloat16 as uint16, source rows float32, records uint8."""
    return {part.name: to_array(rows) for part, rows in snapshot.parts}


def load(arrays: Mapping[str, npt.NDArray[Any]], pos: int, shelf: Shelf) -> DeviceSnapshot:
    """Make a snapshot at `pos` of what `dump` returned, copying it.

    Raises:
        EngineError: as `Engine.load` says; nothing was allocated.
    """
    expected = list(device_parts(shelf.config, pos, has_drafter=shelf.has_drafter, kv_fp8=shelf.kv_fp8))
    require_arrays(arrays, expected, pos, lambda part: _DUMPED[dtype_of(part, kv_fp8=shelf.kv_fp8)])
    return DeviceSnapshot(
        shelf, pos, [(part, _to_tensor(arrays[part.name], shelf.home(part).device)) for part in expected]
    )


def to_array(rows: Tensor) -> npt.NDArray[Any]:
    """Copy rows to the host; bfloat16 as uint16."""
    bits = rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows
    return np.array(bits.cpu().numpy())


def _to_tensor(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    rows = torch.from_numpy(np.array(array, order="C"))
    return (rows.view(torch.bfloat16) if array.dtype == np.uint16 else rows).to(device)
