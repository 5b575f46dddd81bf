"""safetensors index and headers → where each tensor lies. No tensor data is read.

A file is 8 bytes of header length (little-endian), that many bytes of JSON, then the data without
holes. The header is parsed here because a short, stale or mixed-up file must be named before anything
is loaded (a mapped file that is too short reads as zeros).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dsv4nb.checkpoint.jsonfile import parse_object, read_object
from dsv4nb.errors import DamagedCheckpoint, NotACheckpoint

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_SHARD = re.compile(r"[\w-][\w.-]*\.safetensors")

MAX_HEADER_BYTES = 100_000_000  # the format's own bound

# bytes per element of the dtypes a dsv4 checkpoint can hold, and of the common others, so that a
# wrong dtype is reported as such
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2,
    "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        dtype: safetensors spelling, e.g. "F8_E4M3".
        offset: first byte, from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What the index and the headers say.

    Attributes:
        entries: the tensors that can be read.
        named: every tensor that the index or a header names, readable or not.
        files: the shards, in order of name.
        file_bytes: size of the shards that exist, headers included.
        problems: one line per fault, with expected and found values.
    """

    entries: Mapping[str, TensorEntry]
    named: frozenset[str]
    files: tuple[Path, ...]
    file_bytes: int
    problems: tuple[str, ...]


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """Read all headers of `folder`.

    Raises:
        NotACheckpoint: there are no safetensors files.
        DamagedCheckpoint: files are missing, short or contradict the index; all of them are listed.
    """
    found = scan(folder)
    if found.problems:
        raise DamagedCheckpoint(str(folder), found.problems)
    return dict(found.entries)


def scan(folder: Path) -> Scan:
    """Read all headers of `folder`, collecting faults instead of raising.

    Raises:
        NotACheckpoint: there is neither an index nor model.safetensors.
        DamagedCheckpoint: the index itself cannot be read.
    """
    if (folder / INDEX).is_file():
        weight_map = _read_index(folder)
    elif (folder / SINGLE).is_file():
        weight_map = None
    else:
        raise NotACheckpoint(
            f"{folder} has neither {INDEX} nor {SINGLE}; give the folder with the downloaded weights", param="path"
        )
    by_file: dict[str, set[str]] = {SINGLE: set()} if weight_map is None else {}
    for name, file in (weight_map or {}).items():
        by_file.setdefault(file, set()).add(name)

    entries: dict[str, TensorEntry] = {}
    named = set(weight_map or ())
    problems: list[str] = []
    sizes = 0
    files = []
    for file, expected in sorted(by_file.items()):
        path = folder / file
        files.append(path)
        try:
            size = path.stat().st_size
            sizes += size
            header = _read_header(path, size)
        except FileNotFoundError:
            problems.append(f"{file}: missing; {len(expected)} tensors are in it")
            continue
        except (OSError, ValueError) as e:
            problems.append(f"{file}: {e}")
            continue
        found, faults = _parse_header(path, size, header)
        problems += [f"{file}: {fault}" for fault in faults]
        named |= header.raw.keys()
        if weight_map is not None:
            problems += _compare_with_index(file, header.raw.keys(), expected, weight_map)
            found = {name: e for name, e in found.items() if weight_map.get(name) == file}
        entries |= found
    return Scan(
        entries=entries,
        named=frozenset(named),
        files=tuple(files),
        file_bytes=sizes,
        problems=tuple(problems),
    )


def _read_index(folder: Path) -> dict[str, str]:
    def damaged(why: object) -> DamagedCheckpoint:
        return DamagedCheckpoint(str(folder), [f"{INDEX}: {why}"])

    try:
        weight_map = read_object(folder / INDEX).get("weight_map")
    except (OSError, ValueError) as e:
        raise damaged(e) from e
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged("has no weight_map")
    for name, file in weight_map.items():
        # a name from a download must not lead out of the folder
        if not isinstance(file, str) or not _SHARD.fullmatch(file):
            raise damaged(f"weight_map puts {name} into {file!r}, which is no plain name of a safetensors file")
    return weight_map


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    raw: Mapping[str, Any]  # tensors only
    data_start: int


def _read_header(path: Path, size: int) -> _Header:
    """Read the length and the JSON; raises ValueError with the fault, or OSError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            raise ValueError(f"has {size} bytes, the header alone needs {8 + length if size >= 8 else 8}")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
        try:
            raw = parse_object(file.read(length))
        except ValueError as e:
            raise ValueError(f"the header of {length} bytes cannot be read: {e}") from e
    raw.pop("__metadata__", None)
    return _Header(raw=raw, data_start=8 + length)


def _parse_header(path: Path, size: int, header: _Header) -> tuple[dict[str, TensorEntry], list[str]]:
    entries: dict[str, TensorEntry] = {}
    faults = []
    for name, about in header.raw.items():
        try:
            entries[name] = _parse_entry(name, about, path, header.data_start)
        except ValueError as e:
            faults.append(f"{name}: {e}")
    faults += _layout_faults(entries.values(), header.data_start, size, has_all=not faults)
    return {name: e for name, e in entries.items() if e.offset + e.nbytes <= size}, faults


def _parse_entry(name: str, about: object, path: Path, data_start: int) -> TensorEntry:
    if not isinstance(about, dict) or about.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the header says {about!r} instead of dtype, shape and data_offsets")
    dtype, shape, offsets = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}")
    if not _is_counts(shape):
        raise ValueError(f"shape is {shape!r}, not a list of sizes")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets are {offsets!r}, not begin and end")
    nbytes = prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise ValueError(f"{dtype} {list(shape)} needs {nbytes} bytes, data_offsets span {offsets[1] - offsets[0]}")
    return TensorEntry(
        name=name, dtype=dtype, shape=tuple(shape), file=path, offset=data_start + offsets[0], nbytes=nbytes
    )


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _layout_faults(entries: Iterable[TensorEntry], data_start: int, size: int, *, has_all: bool) -> list[str]:
    """Find overlaps, holes and a wrong file size; holes and a long file say nothing unless `has_all`."""
    faults = []
    end, before = data_start, "the header"
    for e in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if e.offset < end:
            faults.append(f"{e.name}: begins at byte {e.offset}, inside {before} that ends at {end}")
        elif e.offset > end and has_all:
            faults.append(f"{e.name}: begins at byte {e.offset}, {e.offset - end} bytes after {before} ends")
        if e.offset + e.nbytes > end:
            end, before = e.offset + e.nbytes, e.name
    if size < end or (size > end and has_all):
        faults.append(f"has {size} bytes, expected {end}")
    return faults


def _compare_with_index(
    file: str, present: Iterable[str], expected: set[str], weight_map: Mapping[str, str]
) -> list[str]:
    present = set(present)
    problems = [f"{name}: the index puts it into {file}, which lacks it" for name in sorted(expected - present)]
    for name in sorted(present - expected):
        place = weight_map.get(name)
        said = f"the index puts it into {place}" if place else "the index does not name it"
        problems.append(f"{name}: is in {file}, but {said}")
    return problems
