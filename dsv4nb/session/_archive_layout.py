"""Where the arrays of an archive lie: header and offsets, which follow from what the manifest says of them. Pure."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

# safetensors spelling by kind and bytes per element
DTYPES = {
    "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "U32": "<u4", "I32": "<i4",
    "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip
SPELLINGS = {(np.dtype(dtype).kind, np.dtype(dtype).itemsize): name for name, dtype in DTYPES.items()}

MAX_DIMS = 32  # of numpy 1
MAX_SIZE = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an array lies, in bytes from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    begin: int
    end: int

    def entry(self) -> dict[str, Any]:
        """Return what the header says of it."""
        return {"dtype": self.dtype, "shape": list(self.shape), "data_offsets": [self.begin, self.end]}


def description_of(array: npt.NDArray[Any]) -> dict[str, Any]:
    """Return what the manifest says of an array."""
    return {
        "dtype": SPELLINGS[array.dtype.kind, array.dtype.itemsize],
        "shape": list(array.shape),
        "sha256": hashlib.sha256(bytes_of(array)).hexdigest(),
    }


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """Return the bytes of a contiguous array, which are the array's own."""
    return array.reshape(-1).view(np.uint8).data


def places_of(arrays: Mapping[str, Any]) -> list[Place]:
    """Place arrays one behind the other, those of the largest elements first, so that all are aligned.

    Args:
        arrays: the description of each, as it was read.

    Raises:
        ValueError: one describes no array.
    """
    items = {name: _item_bytes(name, about) for name, about in arrays.items()}
    places = []
    begin = 0
    for name in sorted(arrays, key=lambda name: (-items[name], name)):
        about = arrays[name]
        shape = tuple(about["shape"])
        end = begin + prod(shape) * items[name]
        places.append(Place(name=name, dtype=about["dtype"], shape=shape, sha256=about["sha256"], begin=begin, end=end))
        begin = end
    return places


def _item_bytes(name: str, about: object) -> int:
    """Return the bytes per element of an array, or raise ValueError for what describes none."""
    if not isinstance(about, dict) or about.keys() != {"dtype", "shape", "sha256"}:
        raise ValueError(f"{name} is described by {reprlib.repr(about)} instead of dtype, shape and sha256")
    dtype, shape, sha256 = about["dtype"], about["shape"], about["sha256"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {reprlib.repr(dtype)}")
    is_list = isinstance(shape, list) and len(shape) <= MAX_DIMS
    if not is_list or not all(type(n) is int and 0 <= n < MAX_SIZE for n in shape):
        raise ValueError(f"{name} has the shape {reprlib.repr(shape)}, which is no list of at most {MAX_DIMS} sizes")
    if not isinstance(sha256, str):
        raise ValueError(f"{name} has the SHA-256 {reprlib.repr(sha256)}")
    return np.dtype(DTYPES[dtype]).itemsize


def header_of(manifest: str, places: Sequence[Place]) -> bytes:
    """Return the JSON in front of the arrays, padded so that they begin at a multiple of 8."""
    metadata = {"manifest": manifest, "manifest_sha256": sha256_of(manifest)}
    header = {"__metadata__": metadata, **{place.name: place.entry() for place in places}}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def sha256_of(text: str) -> str:
    """Return the SHA-256 of a text, in hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
