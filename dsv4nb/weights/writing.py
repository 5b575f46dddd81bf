"""Tensors → a checkpoint folder: config, index and safetensors files, one tensor in memory at a time.

A file is 8 bytes of header length (little-endian), that many bytes of JSON, then the data without holes. Tensors of
larger elements come first, so each begins at a multiple of its element's size.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4nb.checkpoint.headers import INDEX, ITEM_BYTES
from dsv4nb.checkpoint.inventory import Spec
from dsv4nb.errors import RequestError
from dsv4nb.weights.reader import TensorSource

Shard = tuple[int, ...]  # sorts as the files do


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
    for file in files:
        with (folder / file.name).open("wb") as out:
            out.write(file.header)
            for name in file.tensors:
                source.read(name).cpu().contiguous().view(-1).view(torch.uint8).numpy().tofile(out)
    weight_map = {name: file.name for file in files for name in file.tensors}
    total = sum(spec.nbytes for spec in entries.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    _write_json(folder / "inference" / "config.json", inference)
    _write_json(folder / "config.json", config)


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
