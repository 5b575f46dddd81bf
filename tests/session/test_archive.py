from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import resource
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from dsv4nb import __version__
from dsv4nb.checkpoint.headers import MAX_HEADER_BYTES
from dsv4nb.session._archive_layout import DTYPES
from dsv4nb.session.archive import (
    FORMAT,
    REQUIRED,
    VERSION,
    Archive,
    ArchiveError,
    check_compatible,
    read_archive,
    write_archive,
)
from dsv4nb.testing.fake_engine import FakeEngine

TEXTS = {
    "kind": "chat",
    "model": "toy",
    "weights": "ab" * 32,
    "arithmetic": "ref_fp8_round",
    "encoding": "v0731",
    "layout": "cpu 1",
}


def sample() -> Archive:
    """A chat with an array of each kind: odd sizes, one number, none."""
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "window": draw.standard_normal((3, 5)).astype(np.float32),
        "entries": draw.integers(0, 256, 13, np.uint8),
        "pos": np.array(7, np.int64),
        "none": np.empty((0, 4), np.float16),
    }
    turns = [{"user": "Wie spät ist es, 王?", "ids": [1, 2, 3]}, {"user": "\ud800 \x00\n\"'", "ids": []}]
    return Archive(manifest={**TEXTS, "turns": turns, "ledger": list(range(20)), "t": 0.1}, arrays=arrays)


def said(archive: Archive) -> dict[str, Any]:
    """What a manifest says, but for when it was saved."""
    return {name: value for name, value in archive.manifest.items() if name != "created"}


def bits(archive: Archive) -> dict[str, tuple[Any, ...]]:
    """Everything about the arrays."""
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in archive.arrays.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A saved sample."""
    write_archive(tmp_path / "chat.dsv4", sample())
    return tmp_path / "chat.dsv4"


def put(path: Path, content: bytes | bytearray) -> None:
    """Write a file anew: one that is cut and written again, some file systems send to the disk at once."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def refused(path: Path) -> ArchiveError:
    """Read what must be refused, allocating next to nothing; return why."""
    tracemalloc.start()
    try:
        with pytest.raises(ArchiveError) as caught:
            read_archive(path)
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()
    assert caught.value.code == "archive" and str(path) in str(caught.value)
    return caught.value


def forged(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change header and manifest of a file, with digests of the manifest that fit."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    manifest = json.loads(header["__metadata__"]["manifest"])
    change(header, manifest)
    if "__metadata__" in header:
        text = json.dumps(manifest)
        header["__metadata__"] |= {"manifest": text, "manifest_sha256": hashlib.sha256(text.encode()).hexdigest()}
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])


# what was saved comes back


def test_a_chat_comes_back_as_it_was_saved(path: Path) -> None:
    read, saved = read_archive(path), sample()
    assert all(read.manifest[name] == value for name, value in saved.manifest.items())
    assert bits(read) == bits(saved)
    assert (read.manifest["format"], read.manifest["version"], read.manifest["dsv4nb"]) == (
        FORMAT,
        VERSION,
        __version__,
    )
    assert read.manifest["endianness"] == sys.byteorder and read.manifest["created"][:2] == "20"
    assert all(array.flags.writeable and array.flags.c_contiguous for array in read.arrays.values())


def test_what_was_read_can_be_saved_again(path: Path) -> None:
    read = read_archive(path)
    assert write_archive(path.with_name("again"), read) == path.stat().st_size
    again = read_archive(path.with_name("again"))
    assert said(again) == said(read) and bits(again) == bits(read)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_order_and_shape_comes_back(dtype: str, tmp_path: Path) -> None:
    base = np.arange(24).reshape(2, 3, 4).astype(dtype)
    arrays = {
        "plain": base,
        "transposed": base.T,
        "strided": base[:, ::2, 1:],
        "reversed": base[::-1],
        "big-endian": base.astype(base.dtype.newbyteorder(">")),
        "one": base[0, 0, 0, None],
        "scalar": base[1, 1, 1, ...],
        "empty": base[:0],
    }
    write_archive(tmp_path / "x", Archive(manifest=TEXTS, arrays=arrays))
    read = read_archive(tmp_path / "x").arrays
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert read[name].dtype == np.dtype(dtype) and read[name].shape == array.shape
        np.testing.assert_array_equal(read[name], array)


def test_a_chat_without_arrays_comes_back(tmp_path: Path) -> None:
    write_archive(tmp_path / "x", Archive(manifest=TEXTS, arrays={}))
    assert read_archive(tmp_path / "x").arrays == {}


def test_what_an_engine_dumped_goes_on_where_it_was(tmp_path: Path) -> None:
    engine = FakeEngine([11, 12, 13], eos=2, vocab_size=64, max_seq=64)
    state = engine.new_state()
    engine.prefill(state, range(3, 10))
    snapshot = engine.capture(state)
    manifest = {**TEXTS, "layout": engine.layout(), "pos": snapshot.pos}
    write_archive(tmp_path / "x", Archive(manifest=manifest, arrays=engine.dump(snapshot)))
    read = read_archive(tmp_path / "x")
    check_compatible(read.manifest, layout=engine.layout())
    opened = engine.restore(engine.load(read.arrays, read.manifest["pos"]))
    assert opened.ledger == list(range(3, 10))
    np.testing.assert_array_equal(engine.forward_rows(opened, (11,)), engine.forward_rows(state, (11,)))


def test_the_file_is_safetensors_for_its_library(path: Path) -> None:
    arrays, saved = load_file(path), sample().arrays
    assert arrays.keys() == saved.keys()
    assert all((arrays[name] == saved[name]).all() and arrays[name].dtype == saved[name].dtype for name in saved)
    with safe_open(path, "np") as file:
        assert json.loads(file.metadata()["manifest"])["turns"] == sample().manifest["turns"]
    content = path.read_bytes()
    assert int.from_bytes(content[:8], "little") % 8 == 0, "arrays are aligned"


# saving


@contextmanager
def disk_of(n: int) -> Iterator[None]:
    """No file can grow beyond `n` bytes: the write that would is refused by the system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_previous_file_and_no_litter(path: Path) -> None:
    before, other = path.read_bytes(), path.with_name("other")
    following = Archive(manifest={**sample().manifest, "turns": []}, arrays=sample().arrays)
    size = write_archive(other, following)
    header = 8 + int.from_bytes(other.read_bytes()[:8], "little")
    for room in (0, 1, 7, 8, 9, header - 1, header, header + 1, header + 8, size - 2, size - 1):
        with disk_of(room), pytest.raises(ArchiveError, match=rf"free {size} bytes") as caught:
            write_archive(path, following)
        assert caught.value.fault == "disk_full"
        assert path.read_bytes() == before, room
        assert sorted(f.name for f in path.parent.iterdir()) == ["chat.dsv4", "other"], room
    with disk_of(size):
        write_archive(path, following)
    assert read_archive(path).manifest["turns"] == []


def test_a_full_disk_is_met_in_the_middle_of_a_large_array(path: Path) -> None:
    before = path.read_bytes()
    large = Archive(manifest=TEXTS, arrays={"a": np.ones(1 << 20, np.uint8), "b": np.ones(1 << 20, np.uint8)})
    for room in (1 << 19, 1 << 20, 3 << 19):
        with disk_of(room), pytest.raises(ArchiveError) as caught:
            write_archive(path, large)
        assert caught.value.fault == "disk_full" and path.read_bytes() == before
        assert [f.name for f in path.parent.iterdir()] == ["chat.dsv4"]


@pytest.mark.parametrize("where", ["nothing/chat", "chat.dsv4/chat", ".", "a\0b", "n" * 300, "pipe"])
def test_a_path_that_cannot_be_written_is_refused_by_name(where: str, path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    target = path.parent / where
    with pytest.raises(ArchiveError) as caught:
        write_archive(target, sample())
    assert caught.value.fault == "unwritable" and str(target) in str(caught.value)
    assert sorted(f.name for f in path.parent.iterdir()) == ["chat.dsv4", "pipe"]
    assert stat.S_ISFIFO(path.with_name("pipe").stat().st_mode)


def test_a_file_keeps_its_permissions_and_a_link_stays_a_link(path: Path) -> None:
    path.chmod(0o640)
    link = path.with_name("link")
    link.symlink_to(path.name)
    following = Archive(manifest={**TEXTS, "turns": []}, arrays={})
    write_archive(link, following)
    assert link.is_symlink() and read_archive(path).manifest["turns"] == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    mask = os.umask(0o027)
    try:
        write_archive(path.with_name("fresh"), following)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.with_name("fresh").stat().st_mode) == 0o640


def test_what_a_killed_save_left_is_removed_once_it_is_an_hour_old(path: Path) -> None:
    names = [".dsv4nb-1.tmp", ".dsv4nb-2.tmp", "dsv4nb-3.tmp", ".other-4.tmp"]
    for name in names:
        path.with_name(name).touch()
        if name != names[1]:
            os.utime(path.with_name(name), (0, time.time() - 3700))
    write_archive(path, sample())
    assert sorted(f.name for f in path.parent.iterdir()) == sorted(["chat.dsv4", *names[1:]])


def test_of_two_that_save_at_once_one_is_there_whole(path: Path) -> None:
    def save(turn: int) -> None:
        for _ in range(20):
            arrays = {name: np.full(50_000, turn, np.uint8) for name in "ab"}
            write_archive(path, Archive(manifest={**TEXTS, "turn": turn}, arrays=arrays))

    save(0)
    threads = [threading.Thread(target=save, args=(turn,)) for turn in (1, 2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        read = read_archive(path)
        assert all((array == read.manifest["turn"]).all() for array in read.arrays.values())
    assert [f.name for f in path.parent.iterdir()] == ["chat.dsv4"]


class Unpicklable:
    """Fails whoever would pickle it."""

    def __reduce__(self) -> str:
        raise AssertionError("pickled")


@pytest.mark.parametrize(
    ("manifest", "arrays", "param", "message"),
    [
        ({}, {"x": np.array([Unpicklable()])}, "x", "x is object with 1 dimensions"),
        ({}, {"x": np.array(["text"])}, "x", "x is <U4 with 1"),
        ({}, {"x": np.zeros(2, np.complex64)}, "x", "x is complex64"),
        ({}, {"x": np.zeros(2, np.longdouble)}, "x", "x is .* with 1"),
        ({}, {"x": np.zeros(2, "M8[s]")}, "x", "x is datetime64"),
        ({}, {"x": np.zeros((1,) * 33)}, "x", "x is float64 with 33 dimensions"),
        ({}, {"x": [1, 2]}, "x", "x is a list, not an array"),
        ({}, {"__metadata__": np.zeros(2)}, "arrays", "'__metadata__'"),
        ({}, {3: np.zeros(2)}, "arrays", "named 3"),
        ({"turns": {1, 2}}, {}, "manifest", "set is not JSON serializable"),
        ({"t": float("nan")}, {}, "manifest", "JSON"),
        ({"turns": Unpicklable()}, {}, "manifest", "Unpicklable is not JSON"),
        ({"turns": {1: 0, "1": 0}}, {}, "manifest", "'1' appears twice"),
        ({"big": 10**5000}, {}, "manifest", "4300 digits"),
        ({"weights": ""}, {}, "weights", "weights of the manifest is ''; it must be a text"),
        ({"layout": None}, {}, "layout", "layout of the manifest is None"),
    ],
)
def test_what_has_no_place_in_a_file_is_refused_before_anything_is_written(
    manifest: dict[str, Any], arrays: dict[str, Any], param: str, message: str, path: Path
) -> None:
    before = path.read_bytes()
    with pytest.raises(ArchiveError, match=message) as caught:
        write_archive(path, Archive(manifest={**TEXTS, **manifest}, arrays=arrays))
    assert (caught.value.fault, caught.value.param) == ("unsavable", param)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


def test_a_manifest_that_contains_itself_or_is_larger_than_a_header_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_HEADER_BYTES == 100_000_000
    monkeypatch.setattr("dsv4nb.session.archive.MAX_HEADER_BYTES", 100_000)
    turns: list[Any] = []
    turns.append(turns)
    with pytest.raises(ArchiveError, match="Circular"):
        write_archive(path, Archive(manifest={**TEXTS, "turns": turns}, arrays={}))
    with pytest.raises(ArchiveError, match="at most 100000 fit") as caught:
        write_archive(path, Archive(manifest={**TEXTS, "turns": "x" * 100_000}, arrays={}))
    assert caught.value.fault == "unsavable"


def test_kill_9_in_the_middle_of_a_save_leaves_a_whole_file(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_save.py")
    spec = importlib.util.spec_from_file_location("kill_save", script)
    assert spec is not None and spec.loader is not None
    kill_save = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kill_save)
    counts = kill_save.kill(tries=4, seed=0, mib=16, folder=tmp_path)
    for seed in range(1, 20):  # that some die in the middle is a matter of luck
        if counts["while writing"] + counts["before the rename"]:
            break
        counts += kill_save.kill(tries=1, seed=seed, mib=16, folder=tmp_path)
    assert counts["while writing"] + counts["before the rename"] > 0, counts


# reading


def test_a_path_that_cannot_be_read_is_refused_by_name(path: Path) -> None:
    assert refused(path.with_name("nothing")).fault == "missing"
    assert refused(path / "below").fault == "unreadable"
    assert refused(path.parent).fault == "unreadable"
    os.mkfifo(path.with_name("pipe"))
    assert refused(path.with_name("pipe")).fault == "unreadable", "and not waited for"
    assert refused(Path("a\0b")).fault == "unreadable"
    assert refused(Path("/proc/self/mem")).fault in ("unreadable", "truncated")


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    content = path.read_bytes()
    for n in range(len(content)):
        put(path, content[:n])
        with pytest.raises(ArchiveError, match=rf"has {n} of at least \d+ bytes") as caught:
            read_archive(path)
        assert caught.value.fault == "truncated"
    put(path, content + b"\0")
    assert refused(path).fault == "damaged"


def test_a_changed_bit_is_found_in_every_byte(path: Path) -> None:
    content = path.read_bytes()
    draw = random.Random(2)
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << draw.randrange(8)
        put(path, changed)
        with pytest.raises(ArchiveError) as caught:
            read_archive(path)
        assert caught.value.fault in ("foreign", "truncated", "damaged"), at


def test_a_changed_bit_is_found_at_200_places_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    draw = np.random.default_rng(1)
    arrays = {f"layers.{i}": draw.integers(0, 256, 60_000 + i, np.uint8) for i in range(5)}
    write_archive(path, Archive(manifest=TEXTS, arrays=arrays))
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    for at in draw.integers(start, len(content), 200):
        bit = 1 << int(draw.integers(8))
        content[at] ^= bit
        put(path, content)
        content[at] ^= bit
        with pytest.raises(ArchiveError, match=r"layers\.\d has the SHA-256") as caught:
            read_archive(path)
        assert caught.value.fault == "damaged"
    put(path, content)
    assert read_archive(path).arrays.keys() == arrays.keys()


def set_array(name: str, **values: object) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Say something else of an array, in both places."""

    def change(header: dict[str, Any], manifest: dict[str, Any]) -> None:
        header[name] |= {k: v for k, v in values.items() if k != "sha256"}
        manifest["arrays"][name] |= {k: v for k, v in values.items() if k != "data_offsets"}

    return change


def set_manifest(**values: object) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda header, manifest: manifest.update(values)


FORGERIES = {
    # absurd sizes that fit together
    "endless": (set_array("entries", shape=[2**62, 2**62], data_offsets=[68, 68 + 2**124]), "truncated", "bytes"),
    "a terabyte": (set_array("entries", shape=[2**40], data_offsets=[68, 68 + 2**40]), "truncated", "bytes"),
    "endless and empty": (set_array("none", shape=[0, 2**62]), "damaged", "no array has"),
    "more than endless and empty": (set_array("none", shape=[0, 2**70]), "damaged", "at most 32 sizes"),
    "33 dimensions": (set_array("pos", shape=[1] * 33), "damaged", "at most 32 sizes"),
    "negative": (set_array("window", shape=[-3, -5]), "damaged", "at most 32 sizes"),
    "no number": (set_array("window", shape=["3", 5]), "damaged", "at most 32 sizes"),
    "no list": (set_array("window", shape=15), "damaged", "at most 32 sizes"),
    "unknown dtype": (set_array("window", dtype="F128"), "damaged", "unknown dtype 'F128'"),
    "dtype of no text": (set_array("window", dtype=["F32"]), "damaged", "unknown dtype"),
    "a digest that is none": (set_array("window", sha256=5), "damaged", "SHA-256 5"),
    # a header that departs from the manifest
    "overlap": (lambda h, m: h["entries"].update(data_offsets=[60, 73]), "damaged", "data_offsets"),
    "beyond the end": (lambda h, m: h["entries"].update(data_offsets=[10**9, 10**9 + 13]), "damaged", "data_offsets"),
    "backwards": (lambda h, m: h["entries"].update(data_offsets=[81, 68]), "damaged", "data_offsets"),
    "below zero": (lambda h, m: h["pos"].update(data_offsets=[-8, 0]), "damaged", "data_offsets"),
    "another dtype": (lambda h, m: h["window"].update(dtype="I32"), "damaged", "'window'"),
    "another shape": (lambda h, m: h["window"].update(shape=[5, 3]), "damaged", "'window'"),
    "one more": (
        lambda h, m: h.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        "damaged",
        "'more'",
    ),
    "one more that is nothing": (lambda h, m: h.update(more=None), "damaged", "'more'"),
    "one less": (lambda h, m: h.pop("none"), "damaged", "'none'"),
    "swapped": (lambda h, m: h.update(window=h["entries"], entries=h["window"]), "damaged", "header says"),
    # a manifest that lacks something
    "no manifest": (lambda h, m: h.pop("__metadata__"), "foreign", "without a manifest"),
    "another format": (set_manifest(format="weights"), "foreign", "format 'weights'"),
    "newer": (set_manifest(version=VERSION + 1, dsv4nb="9.0"), "version", "dsv4nb 9.0 in version 2"),
    "version 0": (set_manifest(version=0), "damaged", "version 0"),
    "version of no number": (set_manifest(version="1"), "damaged", "version '1'"),
    "other endianness": (set_manifest(endianness="big"), "endianness", "a big-endian machine; this one is little"),
    "no endianness": (set_manifest(endianness=None), "endianness", "None"),
    "no weights": (lambda h, m: m.pop("weights"), "damaged", "weights of its manifest is None"),
    "no arrays": (set_manifest(arrays=None), "damaged", "lists no arrays"),
    "an array of no description": (set_manifest(arrays={"window": 3}), "damaged", "described by 3"),
}


@pytest.mark.parametrize(("change", "fault", "message"), FORGERIES.values(), ids=FORGERIES)
def test_a_forged_header_is_refused_by_name_and_nothing_is_allocated(
    change: Callable[[dict[str, Any], dict[str, Any]], None], fault: str, message: str, path: Path
) -> None:
    forged(path, lambda header, manifest: None)
    assert bits(read_archive(path)) == bits(sample()), "the forger is able"
    forged(path, change)
    error = refused(path)
    assert error.fault == fault and message in str(error), error


def test_bytes_of_another_kind_of_file_are_foreign(path: Path) -> None:
    for content in (
        b"\x80\x05\x95" + bytes(100),  # pickle
        b"PK\x03\x04" + bytes(100),  # zip, torch.save
        b'{"messages": []}' + b" " * 100,
        (2**63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",  # safetensors without anything
        bytes(8) + b"{" * 1_000_000,
        bytes(8),
        (2).to_bytes(8, "little") + b"[]",
        (20).to_bytes(8, "little") + b"[" * 20,
        (20).to_bytes(8, "little") + b"\xff" * 20,
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        (13).to_bytes(8, "little") + b'{"a":1,"a":2}',
        (31).to_bytes(8, "little") + b'{"__metadata__":{"manifest":1}}',
    ):
        put(path, content)
        assert refused(path).fault == "foreign", content[:20]


def test_a_manifest_that_was_changed_is_found_by_its_digest(path: Path) -> None:
    content = path.read_bytes()
    assert content.count(b"ref_fp8_round") == 1
    put(path, content.replace(b"ref_fp8_round", b"ref_fp8_sound"))
    error = refused(path)
    assert error.fault == "damaged" and "its manifest does not have the SHA-256" in str(error)


def test_an_array_that_memory_has_no_room_for_is_refused_by_name(path: Path) -> None:
    size = 3 << 30
    forged(path, set_array("entries", shape=[size], data_offsets=[68, 68 + size]))
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(len(content) - 13 + size)  # without taking room on the disk
    code = (
        "import resource, sys; from dsv4nb.session.archive import ArchiveError, read_archive\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "try: read_archive(sys.argv[1])\n"
        "except ArchiveError as e: print(e.fault, e)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.startswith(f"memory entries of {path} needs {size} bytes of memory; "), run


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Damage a file in one of the ways files are damaged, or in a way that only malice finds."""
    length = int.from_bytes(content[:8], "little")
    at, to = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    kind = draw.randrange(8)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + draw.randbytes(draw.randint(1, 9)) + content[at:]
    if kind == 2:
        return content[:at] + content[to:]
    if kind == 3:
        return content[:at] + bytes(to - at) + content[to:]
    if kind == 4:
        return content[:at] + content[at : at + 40] + content[at + 80 :]
    if kind == 5:
        return draw.choice((draw.randrange(2**64), length + draw.randint(-64, 64))).to_bytes(8, "little") + content[8:]
    changed = bytearray(content)
    if kind == 6:
        for _ in range(draw.randint(1, 4)):
            place = draw.choice((draw.randrange(len(content)), draw.randrange(8 + length)))
            changed[place] = draw.randrange(256)
        return bytes(changed)
    # a number or a text of the header, digest included
    header = json.loads(content[8 : 8 + length])
    manifest = json.loads(header["__metadata__"]["manifest"])
    name = draw.choice(list(manifest["arrays"]))
    odd: Any = draw.choice(
        [None, -1, 0, 2**31, 2**63, 2**64, 10**300, 1.5, True, "", "F64", [], [2**40], [[]], {}, "é\0"]
    )
    spot, key = draw.choice(
        [
            (manifest, draw.choice(list(manifest))),
            (manifest, draw.choice(["version", "endianness"])),
            (manifest["arrays"], name),
            (manifest["arrays"][name], draw.choice(["dtype", "shape", "sha256", "more"])),
            (header, name),
            (header[name], draw.choice(["dtype", "shape", "data_offsets", "more"])),
            (header, "__metadata__"),
        ]
    )
    spot[key] = odd
    if isinstance(header["__metadata__"], dict):
        text = json.dumps(manifest)
        header["__metadata__"] = {
            "manifest": text,
            "manifest_sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + content[8 + length :]


def test_2000_corruptions_are_refused_or_change_nothing_that_is_checked(path: Path) -> None:
    content, whole = path.read_bytes(), read_archive(path)
    draw = random.Random(4)
    met: Counter[str] = Counter()
    start = time.perf_counter()
    for _ in range(2000):
        damaged = mutated(content, draw)
        put(path, damaged)
        try:
            read = read_archive(path)
        except ArchiveError as error:
            met[error.fault] += 1
            continue
        met["read"] += 1
        # the arrays are the ones that were saved; texts of the caller can be forged, with their digest
        assert bits(read) == bits(whole), damaged
        assert all(read.manifest[name] and isinstance(read.manifest[name], str) for name in REQUIRED)
    assert time.perf_counter() - start < 5
    assert min(met[fault] for fault in ("foreign", "truncated", "damaged", "version", "endianness")) > 0, met
    assert met["read"] < 200, met


# what was saved with what is loaded


def test_a_chat_of_the_same_model_is_compatible(path: Path) -> None:
    manifest = read_archive(path).manifest
    check_compatible(manifest, **{name: TEXTS[name] for name in REQUIRED if name != "kind"})
    check_compatible(manifest)


@pytest.mark.parametrize(
    ("param", "way_out"),
    [
        ("model", "Load 'toy', or pass name='toy'"),
        ("weights", "Load the checkpoint of 'toy'"),
        ("arithmetic", "contract='ref_fp8_round'"),
        ("encoding", "encoding='v0731'"),
        ("layout", f"Open it with dsv4nb {__version__}"),
    ],
)
def test_the_first_difference_is_named_with_both_sides_and_the_way_out(param: str, way_out: str, path: Path) -> None:
    manifest = read_archive(path).manifest
    loaded = {name: TEXTS[name] for name in REQUIRED if name != "kind"} | {"layout": "gpu 3", param: "other"}
    with pytest.raises(ArchiveError) as caught:
        check_compatible(manifest, **loaded)
    assert (caught.value.fault, caught.value.param) == ("mismatch", param)
    assert f"saved with {param} {TEXTS[param]!r}; the loaded model has 'other'" in str(caught.value)
    assert way_out in str(caught.value)
