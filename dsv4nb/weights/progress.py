"""How far the reading of a checkpoint has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["headers", "weights", "engine", "warming"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStep:
    """Where a load stands.

    Attributes:
        phase: headers: files are opened and checked; weights: tensors are read; engine: it is made ready to run;
            warming: on GPUs, it runs once, which compiles kernels.
        done_bytes, total_bytes: of the tensors in the files; 0 until they are known.
        shard: the file that is read, the `n_shard`th of `n_shards`; "" and 0 of tensors that are in no file.
        placed: (device, bytes of the weights that are on it) each, as they are laid out there.
    """

    phase: Phase
    done_bytes: int = 0
    total_bytes: int = 0
    shard: str = ""
    n_shard: int = 0
    n_shards: int = 0
    placed: tuple[tuple[str, int], ...] = ()


Progress = Callable[[LoadStep], None]
