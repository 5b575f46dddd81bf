"""DeviceState and DeviceSnapshot: one sequence on the GPUs, and one position of it.

A state has caches of its own, which go back to the engine's shelf when it is released or forgotten; captured graphs
stay with them. A snapshot is a copy of what later positions can see, entries included.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine.cache import Part, live_parts
from dsv4nb.engine.checks import require_arrays
from dsv4nb.engine.device_caches import Caches, blocks_of, device_state_bytes, read_part, value_bytes, write_part
from dsv4nb.engine.memory import CLASSES, ClassBytes, DeviceBytes

MakeContext = Callable[[Caches, int, int], None]  # launches the context rows of positions first … stop - 1


class Shelf:
    """The caches of an engine that no state holds, and how new ones are made.

    Args:
        devices: those that share the weights, each with all caches.
        make_context: of the drafter; None without one.

    Attributes:
        made: caches that exist, held or not.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_seq: int,
        devices: Sequence[torch.device],
        make_context: MakeContext | None = None,
    ) -> None:
        self.config, self.make_context = config, make_context
        self._max_seq, self._devices = max_seq, tuple(devices)
        self._free: deque[Caches] = deque()
        self.made = 0

    @property
    def has_drafter(self) -> bool:
        return self.make_context is not None

    def take(self) -> Caches:
        """Return caches with anything finite in them.

        Raises:
            torch.OutOfMemoryError: there is no room for more.
        """
        try:
            return self._free.pop()
        except IndexError:
            caches = Caches.on(self.config, self._max_seq, self._devices, has_drafter=self.has_drafter)
            self.made += 1
            return caches

    def put(self, caches: Caches) -> None:
        """Take caches back; from any thread."""
        self._free.append(caches)

    def clear(self) -> None:
        """Free the caches that nobody holds."""
        self.made -= len(self._free)
        self._free.clear()


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
        self._caches: Caches | None = shelf.take()
        self._give_back = weakref.finalize(self, shelf.put, self._caches)
        self._give_back.atexit = False

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
        if self.caches.device.type == "cuda":
            torch.cuda.synchronize(self.caches.device)
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
    for caches in state.caches.copies:
        for (part, buffer), (_, rows) in zip(caches.parts(state.pos), snapshot.parts, strict=True):
            write_part(buffer, part, rows.to(buffer.device))
    return state


def dump(snapshot: DeviceSnapshot) -> dict[str, npt.NDArray[Any]]:
    """Return the live values by name, [rows, width]: bfloat16 as uint16, source rows float32."""
    return {part.name: to_array(rows) for part, rows in snapshot.parts}


def load(arrays: Mapping[str, npt.NDArray[Any]], pos: int, shelf: Shelf, device: torch.device) -> DeviceSnapshot:
    """Make a snapshot at `pos` of what `dump` returned, copying it.

    Raises:
        EngineError: as `Engine.load` says; nothing was allocated.
    """
    expected = list(live_parts(shelf.config, pos, has_drafter=shelf.has_drafter))
    require_arrays(arrays, expected, pos, lambda part: np.float32 if value_bytes(part) == 4 else np.uint16)
    return DeviceSnapshot(shelf, pos, [(part, _to_tensor(arrays[part.name], device)) for part in expected])


def to_array(rows: Tensor) -> npt.NDArray[Any]:
    """Copy rows to the host; bfloat16 as uint16."""
    bits = rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows
    return np.array(bits.cpu().numpy())


def _to_tensor(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    rows = torch.from_numpy(np.array(array, order="C"))
    return (rows.view(torch.bfloat16) if array.dtype == np.uint16 else rows).to(device)


def count(
    device: str, shelf: Shelf, states: list[DeviceState], snapshots: list[DeviceSnapshot], max_seq: int
) -> DeviceBytes:
    """Return what caches and copies take, by class; states are counted as far as they are filled."""
    used = dict.fromkeys(CLASSES if shelf.has_drafter else CLASSES[:-1], 0)
    copied = dict(used)
    for state in states:
        if not state.is_released:
            for name, nbytes in device_state_bytes(shelf.config, state.pos, has_drafter=shelf.has_drafter).items():
                used[name] += nbytes
    for snapshot in snapshots:
        for part, rows in snapshot.parts:
            copied[_class_of(part)] += rows.nbytes
    each = device_state_bytes(shelf.config, max_seq, has_drafter=shelf.has_drafter)
    return DeviceBytes(
        device=device,
        classes={
            name: ClassBytes(used=used[name] + copied[name], reserved=shelf.made * each[name] + copied[name])
            for name in used
        },
    )


def _class_of(part: Part) -> str:
    """Return the class of cache that a copy is counted with."""
    of_layer, kind, *leaf = part.name.split(".")
    return "drafter" if of_layer == "mtp" else "source" if leaf == ["source"] else kind
