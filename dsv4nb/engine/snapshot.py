"""Copy out and copy in what is needed to continue at a position.

A snapshot copies the live rows of the rings and shares the blocks of entries, so neither taking nor restoring one
depends on how long the sequence is. As plain arrays it holds exactly the live values, the same that
the digest sees, by the same names; ring sizes and blocks do not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine.blocks import BlockTable, Pools
from dsv4nb.engine.cache import ENTRY_BLOCK, VALUE_BYTES, Part, live_parts
from dsv4nb.engine.checks import require_arrays
from dsv4nb.engine.rings import DraftRings
from dsv4nb.engine.state import Buffer, CpuState, read_rows, write_rows


class CpuSnapshot:
    """One position of a sequence.

    Attributes:
        config, pools: of the state it was taken from.
        parts: ring rows in order, [n, width], and tables of entries; none once it is released.
    """

    def __init__(self, config: ModelConfig, pools: Pools, pos: int, parts: list[tuple[Part, Buffer]]) -> None:
        self.config, self.pools, self.parts = config, pools, parts
        self._pos = pos
        self._nbytes = sum(_own_bytes(part) for part, _ in parts)

    @property
    def pos(self) -> int:
        return self._pos

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def is_released(self) -> bool:
        return not self.parts

    def release(self) -> None:
        """Give rows and blocks back; idempotent, from any thread."""
        parts, self.parts = self.parts, []
        for _, held in parts:
            if isinstance(held, BlockTable):
                held.release()


def capture_state(state: CpuState) -> CpuSnapshot:
    """Keep what is needed to go on at state.pos."""
    parts: list[tuple[Part, Buffer]] = []
    for part, buffer in state.parts():
        parts.append((part, _share(buffer, part) if isinstance(buffer, BlockTable) else read_rows(buffer, part)))
    return CpuSnapshot(state.config, state.pools, state.pos, parts)


def restore_state(snapshot: CpuSnapshot, rings: DraftRings | None = None) -> CpuState:
    """Make a state that goes on from `snapshot`.

    Args:
        rings: empty ones, for a snapshot with the drafter's rows.
    """
    state = CpuState(snapshot.config, snapshot.pools, rings)
    _stand_at(state, snapshot.pos)
    for (part, buffer), (_, held) in zip(state.parts(), snapshot.parts, strict=True):
        if isinstance(buffer, BlockTable):
            assert isinstance(held, BlockTable), part
            buffer.adopt(held, part.last)
        else:
            assert isinstance(held, torch.Tensor), part
            write_rows(buffer, part, held)
    return state


def dump_arrays(snapshot: CpuSnapshot) -> dict[str, npt.NDArray[Any]]:
    """Return the live values by name, [rows, width] float32, copies."""
    return {
        part.name: np.array((held.rows(part.first, part.last) if isinstance(held, BlockTable) else held).numpy())
        for part, held in snapshot.parts
    }


def load_arrays(
    arrays: Mapping[str, npt.NDArray[Any]],
    pos: int,
    config: ModelConfig,
    pools: Pools,
    make_rings: Callable[[], DraftRings | None] = lambda: None,
) -> CpuSnapshot:
    """Make a snapshot at `pos` of what `dump_arrays` returned, copying it.

    Args:
        make_rings: makes empty ones where the arrays have the drafter's rows.

    Raises:
        EngineError: as `Engine.load` says; nothing was allocated.
    """
    rings = make_rings()
    expected = list(live_parts(config, pos, has_drafter=rings is not None))
    require_arrays(arrays, expected, pos, lambda part: np.float32)
    state = CpuState(config, pools, rings)
    state.reserve(pos)
    _stand_at(state, pos)
    for part, buffer in state.parts():
        write_rows(buffer, part, torch.from_numpy(np.array(arrays[part.name], order="C")))
    snapshot = capture_state(state)
    state.release()
    return snapshot


def _stand_at(state: CpuState, pos: int) -> None:
    """Put an empty state at a position whose rows are about to be written."""
    state.pos = pos
    if state.rings is not None:
        state.rings.upto = pos


def _share(table: BlockTable, part: Part) -> BlockTable:
    shared = BlockTable(table.pool)
    shared.adopt(table, part.last)
    return shared


def _own_bytes(part: Part) -> int:
    """Bytes that no other holder of the same blocks has to have: ring rows, or the last block while it can grow."""
    if part.is_entries:
        return VALUE_BYTES * ENTRY_BLOCK * part.width if part.last % ENTRY_BLOCK else 0
    return VALUE_BYTES * (part.last - part.first) * part.width
