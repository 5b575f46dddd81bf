"""A saved chat: one safetensors file that says what it is and shows that it is whole.

The format is safetensors: 8 bytes of header length, that many bytes of JSON, the arrays. `__metadata__` holds two
texts, a manifest (JSON) and its SHA-256. The manifest names each array with dtype, shape and SHA-256, and the rest of
the header follows from that, so every byte of the file is covered. Reading checks all sizes against the size of the
file before it allocates anything, and executes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import reprlib
import secrets
import stat
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dsv4nb import __version__
from dsv4nb.checkpoint.headers import MAX_HEADER_BYTES
from dsv4nb.checkpoint.jsonfile import parse_object
from dsv4nb.errors import Dsv4Error
from dsv4nb.session._archive_layout import (
    DTYPES,
    MAX_DIMS,
    SPELLINGS,
    Place,
    bytes_of,
    description_of,
    header_of,
    places_of,
    sha256_of,
)

FORMAT = "dsv4nb archive"
VERSION = 1

# texts that a manifest must hold: what was saved, and what it can be continued with
REQUIRED = ("kind", "model", "weights", "arithmetic", "encoding", "layout")

CHUNK_BYTES = 4 << 20  # read and hashed at once
STALE_S = 3600.0  # a running save touches its temporary file all the time

Fault = Literal[
    "missing", "unreadable", "foreign", "truncated", "damaged", "version", "endianness",
    "mismatch", "unsavable", "unwritable", "disk_full", "memory",
]  # fmt: skip


class ArchiveError(Dsv4Error):
    """A chat cannot be saved or opened; neither the running chat nor the previous file was touched.

    Attributes:
        fault: what is wrong. Opening: "missing", "unreadable", "foreign" (no archive), "truncated", "damaged",
            "version" (newer than this dsv4nb), "endianness", "mismatch" (of another model), "memory". Saving:
            "unsavable" (a value has no place in a file), "unwritable", "disk_full", "memory".
    """

    code = "archive"

    def __init__(self, fault: Fault, message: str, *, param: str | None = "path") -> None:
        super().__init__(message, param=param)
        self.fault: Fault = fault


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Archive:
    """What a file holds.

    Attributes:
        manifest: JSON. `REQUIRED` are texts that are not empty; other names are the caller's, but for those that
            saving sets: format, version, dsv4nb, created, endianness, arrays.
        arrays: by name, of the dtypes in `DTYPES`. What was read is fresh, little-endian and writable.
    """

    manifest: Mapping[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]]


def write_archive(path: str | os.PathLike[str], archive: Archive) -> int:
    """Save to `path`, whole or not at all; a file that is there keeps its permissions.

    The bytes go to a temporary file in the same folder, which takes the name when they are on disk. When the process
    is killed before, it stays behind as `.dsv4nb-*.tmp`; a later save in that folder removes it when it is an hour old.

    Returns:
        Bytes of the file.

    Raises:
        ArchiveError: a value cannot be saved, the path cannot be written, or the disk is full; the previous file is
            as it was.
    """
    arrays = {name: _array(name, array) for name, array in archive.arrays.items()}
    described = {name: description_of(array) for name, array in arrays.items()}
    places = places_of(described)
    header = header_of(_manifest_text(archive.manifest, described), places)
    if len(header) > MAX_HEADER_BYTES:
        raise ArchiveError(
            "unsavable", f"the manifest takes {len(header)} bytes; at most {MAX_HEADER_BYTES} fit", param="manifest"
        )
    blocks: list[bytes | memoryview] = [len(header).to_bytes(8, "little"), header]
    blocks += [bytes_of(arrays[place.name]) for place in places]
    size = sum(map(len, blocks))
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise ArchiveError("unwritable", f"{path} is no file; give the name of a file")
        _remove_stale(target.parent)
        _replace(target, blocks)
    except (OSError, ValueError) as e:
        full = isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        way_out = f"free {size} bytes, or save elsewhere" if full else "save to a folder that exists and can be written"
        raise ArchiveError(
            "disk_full" if full else "unwritable",
            f"{path} cannot be written: {_reason(e)}; {way_out}. What was saved there before is as it was.",
        ) from e
    return size


def read_archive(path: str | os.PathLike[str]) -> Archive:
    """Read a file and check every byte of it.

    Raises:
        ArchiveError: it is not there, not readable, no archive, not whole, or of a version or machine that this one
            cannot read; nothing was allocated for a file whose sizes do not add up.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its other end
            raise ArchiveError("unreadable", f"{path} is no file; give the file that chat.save wrote")
        with open(path, "rb") as file:
            return _read(file, str(path))
    except FileNotFoundError as e:
        raise ArchiveError("missing", f"{path} does not exist; give the file that chat.save wrote") from e
    except (OSError, ValueError) as e:
        raise ArchiveError("unreadable", f"{path} cannot be read: {_reason(e)}") from e


def check_compatible(
    manifest: Mapping[str, Any],
    *,
    model: str | None = None,
    weights: str | None = None,
    arithmetic: str | None = None,
    encoding: str | None = None,
    layout: str | None = None,
) -> None:
    """Compare what a chat was saved with and what is loaded; None is not compared.

    Raises:
        ArchiveError: they differ; it names the first difference, both sides and the way out.
    """
    name = manifest["model"]
    for param, loaded, way_out in (
        ("model", model, f"Load {name!r}, or pass name={name!r} if it is the same."),
        ("weights", weights, f"Load the checkpoint of {name!r} that it was saved with."),
        ("arithmetic", arithmetic, f"Load it with contract={manifest['arithmetic']!r}."),
        ("encoding", encoding, f"Load it with encoding={manifest['encoding']!r}."),
        ("layout", layout, f"Open it with dsv4nb {manifest.get('dsv4nb')}, which wrote it, on the same devices."),
    ):
        if loaded is not None and manifest[param] != loaded:
            raise ArchiveError(
                "mismatch",
                f"the chat was saved with {param} {manifest[param]!r}; the loaded model has {loaded!r}. {way_out}",
                param=param,
            )


def _manifest_text(manifest: Mapping[str, Any], described: Mapping[str, Any]) -> str:
    """Return the manifest as it is written, or refuse what would not be read again."""
    stamps = {
        "format": FORMAT,
        "version": VERSION,
        "dsv4nb": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "endianness": sys.byteorder,
        "arrays": described,
    }
    try:
        text = json.dumps({**manifest, **stamps}, allow_nan=False, separators=(",", ":"))
        parse_object(text)  # 1 and "1" are two keys in Python
    except (TypeError, ValueError, RecursionError) as e:
        raise ArchiveError("unsavable", f"the manifest is no JSON: {e}", param="manifest") from e
    for name in _no_texts(manifest):
        raise ArchiveError(
            "unsavable", f"{name} of the manifest is {manifest.get(name)!r}; it must be a text", param=name
        )
    return text


def _no_texts(manifest: Mapping[str, Any]) -> list[str]:
    return [name for name in REQUIRED if not isinstance(manifest.get(name), str) or not manifest[name]]


def _array(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array in the byte order and contiguity of the file; itself when it has them."""
    if not isinstance(name, str) or name == "__metadata__":
        raise ArchiveError("unsavable", f"an array is named {name!r}; it must be another text", param="arrays")
    if not isinstance(array, np.ndarray):
        raise ArchiveError("unsavable", f"{name} is a {type(array).__name__}, not an array", param=name)
    if (array.dtype.kind, array.dtype.itemsize) not in SPELLINGS or array.ndim > MAX_DIMS:
        raise ArchiveError(
            "unsavable",
            f"{name} is {array.dtype} with {array.ndim} dimensions; numbers and bools of 1 to 8 bytes in at most "
            f"{MAX_DIMS} dimensions can be saved",
            param=name,
        )
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _replace(target: Path, blocks: list[bytes | memoryview]) -> None:
    """Write a temporary file beside `target` and give it its name once it is on disk."""
    temporary = target.with_name(f".dsv4nb-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)  # after the rename there is none
    # the name is in the folder, which not every system lets one open; what it names is on disk already
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _remove_stale(folder: Path) -> None:
    """Remove what killed processes left behind."""
    for path in folder.glob(".dsv4nb-*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()


def _read(file: BufferedReader, path: str) -> Archive:
    size = os.fstat(file.fileno()).st_size
    raw, data_start = _read_header(file, size, path)
    manifest = _manifest(raw.pop("__metadata__", None), path)
    try:
        places = places_of(manifest["arrays"])
    except ValueError as e:
        raise _damaged(path, str(e)) from e
    follows = {place.name: place.entry() for place in places}
    for name in sorted(raw.keys() | follows.keys()):
        said, follow = raw.get(name, "nothing"), follows.get(name, "nothing")
        if said != follow:
            said, follow = reprlib.repr(said), reprlib.repr(follow)
            raise _damaged(path, f"its header says {said} of {name!r}, its manifest {follow}")
    expected = data_start + (places[-1].end if places else 0)
    if size < expected:
        raise _truncated(path, size, expected)
    if size > expected:
        raise _damaged(path, f"it has {size} bytes, {size - expected} more than its header says")
    return Archive(manifest=manifest, arrays={place.name: _read_array(file, place, path) for place in places})


def _read_header(file: BufferedReader, size: int, path: str) -> tuple[dict[str, Any], int]:
    """Return the JSON of the header and where the arrays begin."""
    if size < 8:
        raise _truncated(path, size, 8)
    length, first = int.from_bytes(file.read(8), "little"), file.read(1)
    if length > MAX_HEADER_BYTES:
        raise _foreign(path, f"it begins with a header length of {length}; at most {MAX_HEADER_BYTES} are allowed")
    if first not in (b"{", b""):
        raise _foreign(path, f"{first!r} stands where its header should begin")
    if size < 8 + length:
        raise _truncated(path, size, 8 + length)
    try:
        file.seek(8)
        return parse_object(file.read(length)), 8 + length
    except ValueError as e:
        raise _foreign(path, f"its header of {length} bytes is no JSON: {e}") from e


def _manifest(metadata: object, path: str) -> dict[str, Any]:
    """Return the manifest, known to be as it was written and of a version that can be read."""
    if not isinstance(metadata, dict) or not all(
        isinstance(metadata.get(name), str) for name in ("manifest", "manifest_sha256")
    ):
        raise _foreign(path, "it is a safetensors file without a manifest")
    if sha256_of(metadata["manifest"]) != metadata["manifest_sha256"]:
        raise _damaged(path, "its manifest does not have the SHA-256 that stands beside it")
    try:
        manifest = parse_object(metadata["manifest"])
    except ValueError as e:
        raise _damaged(path, f"its manifest cannot be read: {e}") from e
    version = manifest.get("version")
    if manifest.get("format") != FORMAT:
        raise _foreign(path, f"its manifest says format {reprlib.repr(manifest.get('format'))} instead of {FORMAT!r}")
    if type(version) is not int or version < 1:
        raise _damaged(path, f"its manifest says version {reprlib.repr(version)}")
    if version > VERSION:
        raise ArchiveError(
            "version",
            f"{path} was written by dsv4nb {manifest.get('dsv4nb')} in version {version} of the format; "
            f"dsv4nb {__version__} reads up to version {VERSION}. Update dsv4nb.",
        )
    if manifest.get("endianness") != sys.byteorder:
        raise ArchiveError(
            "endianness",
            f"{path} was written on a {manifest.get('endianness')}-endian machine; this one is {sys.byteorder}-endian. "
            "Open it where it was written and copy the messages.",
        )
    for name in _no_texts(manifest):
        raise _damaged(path, f"{name} of its manifest is {reprlib.repr(manifest.get(name))} instead of a text")
    if not isinstance(manifest.get("arrays"), dict):
        raise _damaged(path, "its manifest lists no arrays")
    return manifest


def _read_array(file: BufferedReader, place: Place, path: str) -> npt.NDArray[Any]:
    try:
        array = np.empty(place.shape, DTYPES[place.dtype])
    except MemoryError as e:
        needed = place.end - place.begin
        raise ArchiveError("memory", f"{place.name} of {path} needs {needed} bytes of memory; close other chats") from e
    except ValueError as e:
        raise _damaged(path, f"{place.name} has the shape {list(place.shape)}, which no array has") from e
    digest = hashlib.sha256()
    left = bytes_of(array)
    while left:
        n = file.readinto(left[:CHUNK_BYTES])
        if not n:
            raise _truncated(path, file.tell(), file.tell() + len(left))
        digest.update(left[:n])
        left = left[n:]
    if digest.hexdigest() != place.sha256:
        raise _damaged(path, f"{place.name} has the SHA-256 {digest.hexdigest()[:12]}… instead of {place.sha256[:12]}…")
    return array


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def _foreign(path: str, why: str) -> ArchiveError:
    return ArchiveError("foreign", f"{path} is no saved chat: {why}. Give the file that chat.save wrote.")


def _truncated(path: str, size: int, expected: int) -> ArchiveError:
    return ArchiveError(
        "truncated", f"{path} has {size} of at least {expected} bytes; copy it again from where it is whole."
    )


def _damaged(path: str, why: str) -> ArchiveError:
    return ArchiveError("damaged", f"{path} was changed since it was written: {why}. Restore it from a copy.")
