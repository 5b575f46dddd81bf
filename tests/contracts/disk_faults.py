"""Faults while a chat is written to disk or read back: the file is the old or the new one, whole, and so is the chat.

    python tests/contracts/disk_faults.py --model toy --seed 0

A chat with one turn is saved, a turn is added, and the second save fails, or its process dies, at every kind of place
in the file: in its length, in its header, at the start, in the middle and at the end of each array, before it is
flushed to the disk, before it takes its name, and before the name is flushed. Then the second file is read back torn,
changed, failing and without memory at the same places. After each:

- the file holds one turn or two, and opens as such;
- the running chat, what is known of earlier runs, and the blocks that hold it are as they were;
- the next turn of the chat, and of the opened one, gives the ids of a cold run on another engine.
"""

from __future__ import annotations

import argparse
import errno
import gc
import io
import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults import Bench, words
from models import KINDS, opened, printable
from places import PLACES, Broken, Fault, Gate, Place, When, gated

from dsv4nb.errors import Dsv4Error
from dsv4nb.session import archive
from dsv4nb.session._archive_layout import places_of
from dsv4nb.session.archive import ArchiveError, read_archive
from dsv4nb.session.chat import Chat

Outcomes = dict[tuple[str, str], Counter[str]]
ERRORS: dict[str, Callable[[], BaseException]] = {
    "no space": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "disk error": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "interrupt": KeyboardInterrupt,
}
READING = ("disk error", "interrupt", "torn", "a bit")

# what an opening calls when the file is read
OPENING = {name: PLACES[name] for name in ("load", "rings of a state", "growth of blocks", "sharing of blocks")} | {
    "an array's memory": Place(of=lambda model: [(archive.np, "empty")], faults=("memory",), whens=("before",)),
    "made known": Place(of=lambda model: [(model.cache, "adopt")], whens=("before",)),
}
CALLS = 3  # of each place that are broken: the first, and the following ones


def kinds_of_byte(path: Path) -> dict[str, list[int]]:
    """Return where in a file something can happen: kind of place -> offsets."""
    content = path.read_bytes()
    length, size = int.from_bytes(content[:8], "little"), len(content)
    start = 8 + length
    spots = {
        "the length": [0, 1, 7],
        "the header": [8, 8 + length // 2, start - 1],
        "an array, start": [],
        "an array, middle": [],
        "an array, end": [],
    }
    for place in places_of(read_archive(path).manifest["arrays"]):
        if place.end > place.begin:
            spots["an array, start"].append(start + place.begin)
            spots["an array, middle"].append(start + (place.begin + place.end) // 2)
            spots["an array, end"].append(start + place.end - 1)
    assert max(max(offsets) for offsets in spots.values()) == size - 1
    return spots


class Failing(io.RawIOBase):
    """A file that fails once so many bytes were written or read."""

    def __init__(self, file: Any, room: int, fail: Callable[[], None]) -> None:
        self._file, self._left, self._fail = file, room, fail

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) > self._left:
            self._file.write(view[: self._left])
            self._file.flush()
            self._fail()
        self._left -= len(view)
        return int(self._file.write(view))

    def read(self, n: int = -1) -> bytes:
        self._take(n)
        return bytes(self._file.read(n))

    def readinto(self, data: Any) -> int:
        self._take(len(data))
        return int(self._file.readinto(data))

    def _take(self, n: int) -> None:
        if self._file.tell() + n > self._left:
            self._fail()

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def fileno(self) -> int:
        return int(self._file.fileno())

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def raising(error: Callable[[], BaseException]) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error()

    return fail


def die(*_: object, **__: object) -> None:
    os._exit(9)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an attribute be something else."""
    had, before = name in vars(owner), getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def failing_write(spot: str, at: int, fail: Callable[..., Any]) -> Iterator[None]:
    """Let the next save fail there."""
    if spot == "before the rename":
        with replaced(archive.os, "replace", fail):
            yield
    elif spot in ("before the flush", "before the folder's flush"):
        flushes, real = iter((spot == "before the flush", True)), os.fsync
        with replaced(archive.os, "fsync", lambda file: fail() if next(flushes) else real(file)):
            yield
    else:
        real_open = Path.open
        with replaced(Path, "open", lambda path, *how: Failing(real_open(path, *how), at, fail)):
            yield


@dataclass(slots=True)
class Disk:
    """A chat of two turns, its file of one turn and its file of both."""

    bench: Bench
    folder: Path
    chat: Chat = field(init=False)
    old: bytes = field(init=False)
    new: bytes = field(init=False)
    stats: Any = field(init=False)
    outcomes: Outcomes = field(init=False)

    def __post_init__(self) -> None:
        model = self.bench.model
        self.outcomes = defaultdict(Counter)
        self.chat = model.chat(**self.bench.options)
        self.chat.send(words(30, 0))
        self.chat.save(self.path)
        self.old = self.path.read_bytes()
        self.chat.send(words(40, 1))
        self.chat.save(self.path)
        self.new = self.path.read_bytes()

    @property
    def path(self) -> Path:
        return self.folder / "chat.dsv4"

    def put(self, content: bytes) -> None:
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(content)

    def told(self) -> tuple[Any, ...]:
        """Return what must not change."""
        state = self.chat.state()
        return state.nodes, state.head, state.ledger, self.chat.messages, self.bench.model.cache.stats()

    def write(self, spot: str, at: int, name: str) -> None:
        """Let a save over the old file fail."""
        self.put(self.old)
        before = self.told()
        try:
            with failing_write(spot, at, raising(ERRORS[name])):
                self.chat.save(self.path)
            outcome = "saved"
        except ArchiveError as error:
            outcome = error.fault
        except KeyboardInterrupt:
            outcome = "interrupted"
        assert self.told() == before
        self.check_file(spot, name, outcome)

    def kill(self, spot: str, at: int) -> None:
        """Let a process die that saves over the old file."""
        self.put(self.old)
        saved = read_archive(self.folder / "new.dsv4")
        child = os.fork()
        if not child:
            with failing_write(spot, at, die):
                archive.write_archive(self.path, saved)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        for litter in self.folder.glob(".dsv4nb-*.tmp"):
            litter.unlink()
        self.check_file(spot, "death", "died")

    def check_file(self, spot: str, name: str, outcome: str) -> None:
        """The file is the old one or, from the rename on, the new one."""
        turns = len(read_archive(self.path).manifest["turns"])
        is_new = spot == "before the folder's flush"
        assert turns == 1 + is_new and (is_new or self.path.read_bytes() == self.old)
        assert not list(self.folder.glob(".dsv4nb-*")), "litter"
        self.outcomes[f"write: {spot}", name][f"{outcome}, {'new' if is_new else 'old'} file"] += 1

    def read(self, spot: str, at: int, name: str) -> None:
        """Let an opening of the new file fail."""
        self.put(self.new)
        before = self.told()
        if name == "torn":
            self.put(self.new[:at])
        elif name == "a bit":
            self.put(self.new[:at] + bytes([self.new[at] ^ 1 << at % 8]) + self.new[at + 1 :])
        real_open = open
        fail = raising(ERRORS.get(name, RuntimeError))
        is_error = name in ERRORS
        with replaced(archive, "open", lambda *how: Failing(real_open(*how), at, fail)) if is_error else nothing():
            self.refused(f"read: {spot}", name)
        assert self.told() == before

    def open(self, name: str, at: int, when: When, fault: Fault) -> None:
        """Let an opening of the new file fail when it is read."""
        model, place = self.bench.model, OPENING[name]
        self.put(self.new)
        self.bench.forget()
        before, gate = self.told(), Gate(at, when, fault)
        with gated(place, model, gate):
            self.refused(f"open: {name}, {when}", fault)
        assert gate.is_hit and self.told() == before
        gc.collect()
        assert model.engine.blocks_in_use == 0  # type: ignore[attr-defined]

    def calls(self, name: str) -> int:
        """Return how often a place is called in an opening."""
        self.bench.forget()
        gate = Gate()
        with gated(OPENING[name], self.bench.model, gate):
            self.bench.model.open_chat(self.path)
        return gate.calls

    def refused(self, spot: str, name: str) -> None:
        """Open, and see it refused."""
        try:
            self.bench.model.open_chat(self.path)
        except (Dsv4Error, KeyboardInterrupt, MemoryError, Broken) as error:
            self.outcomes[spot, name][str(getattr(error, "fault", type(error).__name__))] += 1
        else:
            raise AssertionError(f"{spot}, {name}: opened all the same")

    def check(self) -> None:
        """The chat and its file go on as a fresh process does."""
        self.put(self.new)
        self.bench.check_next(self.chat)
        self.bench.model.cache.clear()
        again = self.bench.model.open_chat(self.path)
        assert again.messages == self.chat.messages
        self.bench.check_next(again)
        self.bench.check_blocks()


@contextmanager
def nothing() -> Iterator[None]:
    yield


def run(kind: str, seed: int, most: int) -> Outcomes:
    """Let saves and openings fail; return what came of them by place and fault.

    Args:
        most: offsets of each kind, drawn from all; 0 takes all.
    """
    rng = random.Random(seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        opened(kind, Path(folder), seed, name="disk") as model,
        opened(kind, Path(folder), seed, name="fresh") as fresh,
    ):
        options: dict[str, Any] = {"max_new": 4, "temperature": 0}
        if kind == "tiny":
            options["logit_bias"] = printable(model)
        saves = Path(folder) / "saves"
        saves.mkdir()
        disk = Disk(Bench(kind, model, fresh, options), saves)
        (saves / "new.dsv4").write_bytes(disk.new)
        spots = kinds_of_byte(saves / "new.dsv4")
        places = [(spot, at) for spot, all_ in spots.items() for at in (rng.sample(all_, most) if most else all_)]
        ends = [(spot, 0) for spot in ("before the flush", "before the rename", "before the folder's flush")]
        for spot, at in places + ends:
            for name in ERRORS:
                disk.write(spot, at, name)
            disk.kill(spot, at)
        disk.check()
        for spot, at in places:
            for name in READING:
                disk.read(spot, at, name)
        disk.check()
        for name, place in OPENING.items():
            for at in range(min(disk.calls(name), CALLS)):
                for when, fault in itertools.product(place.whens, place.faults):
                    if fault != "cancel":
                        disk.open(name, at, when, fault)
        disk.check()
        return disk.outcomes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Break saves and openings at every kind of byte.")
    parser.add_argument("--model", choices=KINDS, default="toy")
    parser.add_argument("--most", type=int, default=0, help="places of each kind, drawn at random; all by default")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    outcomes = run(args.model, args.seed, args.most)
    print(f"{'place':<44}{'fault':<12}{'times':>5}  what came of it")
    for (spot, name), counts in outcomes.items():
        ended = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
        print(f"{spot:<44}{name:<12}{sum(counts.values()):5}  {ended}")
    times, seconds = sum(sum(counts.values()) for counts in outcomes.values()), time.monotonic() - started
    print(f"{times} faults on {args.model}, seed {args.seed}, {seconds:.0f} s: all whole")


if __name__ == "__main__":
    sys.exit(main())
