"""Tensors → a checkpoint folder: config, index and safetensors files, few tensors in memory at a time.

A file is 8 bytes of header length (little-endian), that many bytes of JSON, then the data without holes. Tensors of
larger elements come first, so each begins at a multiple of its element's size. Threads write while the next tensors
are made.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from dsv4nb.checkpoint.headers import INDEX, ITEM_BYTES
from dsv4nb.checkpoint.inventory import Spec
from dsv4nb.errors import RequestError
from dsv4nb.weights.reader import TensorSource

Shard = tuple[int, ...]  # sorts as the files do

WRITERS = 4
PENDING_BYTES = 256 << 20  # of tensors that are made and not written


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    name: str
    tensors: Sequence[str]  # in the order of their data
    header: bytes
    nbytes: int  # of the whole file


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    inference: Mapping[str, Any],
    source: TensorSource,
    entries: Mapping[str, Spec],
    shard_of: Callable[[str], Shard],
) -> None:
    """Write a checkpoint folder; config.json comes last, so what was interrupted is none.

    Args:
        config, inference: config.json and inference/config.json.
        source: makes or reads the tensors `entries`.
        shard_of: the file of a tensor, as a key; files are numbered in the order of the keys.

    Raises:
        RequestError: the folder holds a checkpoint already, or the disk lacks the room; nothing was written.
    """
    files = _files(entries, shard_of)
    _require_room(folder, files)
    (folder / "inference").mkdir(parents=True, exist_ok=True)
    with _Writing() as writing:
        for file in files:
            path, at = folder / file.name, len(file.header)
            with path.open("wb") as out:
                out.write(file.header)
                out.truncate(file.nbytes)
            for name in file.tensors:
                writing.put(path, at, source.read(name))
                at += entries[name].nbytes
    weight_map = {name: file.name for file in files for name in file.tensors}
    total = sum(spec.nbytes for spec in entries.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    _write_json(folder / "inference" / "config.json", inference)
    _write_json(folder / "config.json", config)


class _Writing:
    """Writes by threads; a context manager that ends with the last of them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(WRITERS, "dsv4nb-write")
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0  # that are pending

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while kind is None and self._pending:
                self._finish_one()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def put(self, path: Path, at: int, tensor: Tensor) -> None:
        """Write a tensor from byte `at` on, when those before it leave room for it in memory."""
        data = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        while self._pending and self._bytes + data.nbytes > PENDING_BYTES:
            self._finish_one()
        self._pending.append((self._pool.submit(_write, path, at, data), data.nbytes))
        self._bytes += data.nbytes

    def _finish_one(self) -> None:
        future, nbytes = self._pending.popleft()
        self._bytes -= nbytes
        future.result()


def _write(path: Path, at: int, data: Tensor) -> None:
    with path.open("r+b", buffering=0) as out:
        out.seek(at)
        view, done = data.numpy().data, 0
        while done < len(view):
            done += out.write(view[done:])


def _files(entries: Mapping[str, Spec], shard_of: Callable[[str], Shard]) -> list[_File]:
    shards: dict[Shard, list[str]] = {}
    for name in sorted(entries, key=lambda name: (-ITEM_BYTES[entries[name].dtype], name)):
        shards.setdefault(shard_of(name), []).append(name)
    return [
        _file(f"model-{number:05}-of-{len(shards):05}.safetensors", names, entries)
        for number, (_, names) in enumerate(sorted(shards.items()), 1)
    ]


def _file(file: str, names: Sequence[str], entries: Mapping[str, Spec]) -> _File:
    about: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        spec = entries[name]
        about[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return _File(name=file, tensors=names, header=header, nbytes=len(header) + end)


def _require_room(folder: Path, files: Sequence[_File]) -> None:
    if (folder / INDEX).exists() or (folder / "config.json").exists():
        raise RequestError(f"{folder} holds a checkpoint already; give an empty folder", param="folder")
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    needed, free = sum(file.nbytes for file in files), shutil.disk_usage(existing).free
    if needed > free:
        raise RequestError(
            f"the checkpoint takes {needed:,} bytes in {len(files)} files, and the disk of {folder} has {free:,} free. "
            "Fewer layers or experts take less.",
            param="folder",
        )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
