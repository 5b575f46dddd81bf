"""The states and snapshots of an engine that are alive, counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import WeakSet

from torch import Tensor

from dsv4nb.engine.blocks import BlockPool, Pools
from dsv4nb.engine.cache import ENTRY_BLOCK, VALUE_BYTES
from dsv4nb.engine.memory import CLASSES, ClassBytes, DeviceBytes
from dsv4nb.engine.snapshot import CpuSnapshot
from dsv4nb.engine.state import CpuState

State = TypeVar("State")
Held = TypeVar("Held")


class Living(Generic[State, Held]):
    """The states and snapshots of one engine, as long as they are alive."""

    def __init__(self) -> None:
        self._states: WeakSet[State] = WeakSet()
        self._snapshots: WeakSet[Held] = WeakSet()
        self._lock = threading.Lock()

    def state(self, state: State) -> State:
        """Count a state as long as it is alive."""
        with self._lock:
            self._states.add(state)
        return state

    def snapshot(self, snapshot: Held) -> Held:
        """Count a snapshot as long as it is alive."""
        with self._lock:
            self._snapshots.add(snapshot)
        return snapshot

    def both(self) -> tuple[list[State], list[Held]]:
        """Return the states and the snapshots; from any thread."""
        with self._lock:
            return list(self._states), list(self._snapshots)


class Holdings(Living[CpuState, CpuSnapshot]):
    """What the caches of a CPU engine take."""

    def __init__(self, pools: Pools, *, has_drafter: bool) -> None:
        super().__init__()
        self._pools, self._has_drafter = pools, has_drafter

    def count(self, device: str) -> DeviceBytes:
        """Return the bytes by class."""
        states, snapshots = self.both()
        rings = dict.fromkeys(CLASSES, 0)
        for name, nbytes in (*_of_states(states), *_of_snapshots(snapshots)):
            rings[name] += nbytes
        classes = {name: ClassBytes(used=nbytes, reserved=nbytes) for name, nbytes in rings.items()}
        for name in ("compressor", "indexer"):
            pools = [pool for layer in self._pools.layers if (pool := getattr(layer, name)) is not None]
            classes[name] = ClassBytes(used=sum(map(_used, pools)), reserved=sum(pool.rows.nbytes for pool in pools))
        if not self._has_drafter:
            del classes["drafter"]
        return DeviceBytes(device=device, classes=classes)


def _of_states(states: list[CpuState]) -> Iterator[tuple[str, int]]:
    for state in states:
        for layer in state.layers:
            yield "window", layer.window.nbytes
            for cache in (layer.compressor, layer.indexer):
                if cache is not None:
                    yield "source", cache.source.nbytes
        if (rings := state.rings) is not None:
            yield "drafter", rings.taps.nbytes + rings.rows.nbytes


def _of_snapshots(snapshots: list[CpuSnapshot]) -> Iterator[tuple[str, int]]:
    for snapshot in snapshots:
        for part, held in snapshot.parts:
            if isinstance(held, Tensor):
                name = "drafter" if part.name.startswith("mtp.") else part.name.rpartition(".")[2]
                yield name, held.nbytes


def _used(pool: BlockPool) -> int:
    return pool.in_use * ENTRY_BLOCK * pool.width * VALUE_BYTES
