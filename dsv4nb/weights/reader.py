"""Tensor bytes from the files, as they stand there."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from dsv4nb.checkpoint.headers import TensorEntry
from dsv4nb.errors import DamagedCheckpoint

DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # bits, never numbers (T23)
    "I8": torch.int8,
    "I64": torch.int64,
    "U8": torch.uint8,
}


class TensorSource(Protocol):
    """Where a loader takes tensors from, by official name: the files of a `Reader`, or a `SyntheticReader`."""

    bytes_read: int

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __contains__(self, name: str) -> bool: ...

    def dtype(self, name: str) -> str:
        """Return the safetensors spelling of the dtype of `name`."""
        ...

    def read(self, name: str) -> Tensor:
        """Return tensor `name` as stored, the caller's own; e8m0 scales come as their bytes, uint8."""
        ...


class Reader:
    """Reads tensors of one checkpoint; a context manager that closes its files.

    Args:
        entries: where each tensor lies, by name.
    """

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._entries = entries
        self._maps: dict[Path, mmap.mmap] = {}
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def dtype(self, name: str) -> str:
        """Return the safetensors spelling of the dtype of `name`."""
        return self._entries[name].dtype

    def read(self, name: str) -> Tensor:
        """Return a copy of tensor `name`; e8m0 scales come as their bytes, uint8.

        Raises:
            DamagedCheckpoint: the file ends before the tensor does.
        """
        entry = self._entries[name]
        mapped = self._map(entry.file)
        data = bytearray(mapped[entry.offset : entry.offset + entry.nbytes])
        if len(data) != entry.nbytes:
            raise DamagedCheckpoint(
                str(entry.file.parent),
                [f"{entry.file.name}: {name} needs {entry.nbytes} bytes, {len(data)} are there"],
            )
        self.bytes_read += entry.nbytes
        return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as handle:
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]
