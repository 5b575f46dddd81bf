"""Pieces of files, read by threads ahead of whoever takes them, into a ring of host memory.

A slot of the ring is read into again once what was in it is copied, which the events of a GPU tell. The ring is pinned
where the copies go to a GPU, so that they run beside everything else; it is all the host memory that a load needs.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from dsv4nb.checkpoint.headers import TensorEntry
from dsv4nb.errors import DamagedCheckpoint
from dsv4nb.weights.pieces import Piece

SLOT_BYTES = 16 << 20  # four matrices of a V4-Flash expert
SLOTS = 32  # half a GiB
THREADS = min(8, os.cpu_count() or 1)


class Slot:
    """A part of the ring.

    Args:
        gpu: whose copies read it; pinned memory serves all GPUs. None for memory that is not pinned.

    Raises:
        MemoryError: there is none.

    Attributes:
        bytes: [nbytes] uint8.
        copies: events behind the copies out of it that are under way.
    """

    def __init__(self, nbytes: int, gpu: torch.device | None) -> None:
        mapped = mmap.mmap(-1, nbytes)  # goes back to the system when it is dropped
        self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self.view = memoryview(mapped)
        self.copies: list[torch.cuda.Event] = []
        if gpu is not None:
            with torch.cuda.device(gpu):
                _pin(self.bytes)
            weakref.finalize(self, _unpin, self.bytes.data_ptr(), gpu).atexit = False

    def wait(self) -> None:
        """Wait until nothing reads the slot."""
        for event in self.copies:
            event.synchronize()
        self.copies.clear()


class ReadAhead:
    """Reads `pieces` in their order; a context manager whose end stops the threads and frees the ring.

    Args:
        entries: where the tensors lie.
        gpu: one of those that the pieces are copied to, None where they stay on the host.
    """

    def __init__(
        self, entries: Mapping[str, TensorEntry], pieces: Sequence[Piece], *, gpu: torch.device | None = None
    ) -> None:
        self._entries, self._pieces, self._gpu = entries, pieces, gpu
        self._slot_bytes = max((piece.nbytes for piece in pieces), default=0)
        self._lock = threading.Lock()
        self._freed, self._arrived = threading.Condition(self._lock), threading.Condition(self._lock)
        self._free: deque[Slot] = deque()
        self._made = 0  # slots
        self._begun = 0  # pieces
        self._read: dict[int, Slot] = {}  # by number of the piece
        self._failure: BaseException | None = None
        self._is_over = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_over = True
            self._freed.notify_all()
        for thread in self._threads:
            if thread.is_alive():  # one whose start was interrupted finds that all is over
                thread.join()
        for slot in (*self._free, *self._read.values()):
            slot.wait()
        self._free.clear()
        self._read.clear()
        self._threads.clear()

    def has(self, number: int) -> bool:
        """Whether `take(number)` would not wait."""
        with self._lock:
            return number in self._read

    def take(self, number: int) -> Slot:
        """Wait for piece `number`, and return what has it, for `give_back`.

        Raises:
            DamagedCheckpoint: a file cannot be read, or ends too early.
            MemoryError: there is none for the ring.
        """
        if not self._threads:  # begun here, where `__exit__` is sure to follow
            self._start()
        with self._lock:
            while number not in self._read:
                if self._failure is not None:
                    raise self._failure.with_traceback(None)
                self._arrived.wait()
            return self._read.pop(number)

    def give_back(self, slot: Slot) -> None:
        """Let something else be read into a slot once its `copies` are done."""
        with self._lock:
            self._free.append(slot)
            self._freed.notify()

    def _start(self) -> None:
        for number in range(min(THREADS, len(self._pieces))):
            thread = threading.Thread(target=self._work, name=f"dsv4nb-read-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        try:
            with _Files(self._entries) as files:
                while (begun := self._begin()) is not None:
                    number, slot = begun
                    slot = slot or Slot(self._slot_bytes, self._gpu)
                    slot.wait()
                    files.read(self._pieces[number], slot.view)
                    with self._lock:
                        self._read[number] = slot
                        self._arrived.notify()
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error.with_traceback(None)
                self._is_over = True
                self._arrived.notify()
                self._freed.notify_all()

    def _begin(self) -> tuple[int, Slot | None] | None:
        """Return the next piece and the slot for it, None in place of one to make; None when there is none.

        A piece is begun with a slot at hand: so the first ones never wait for later ones that fill the ring.
        """
        with self._lock:
            while not self._is_over and self._begun < len(self._pieces):
                if self._free or self._made < SLOTS:
                    self._made += not self._free
                    self._begun += 1
                    return self._begun - 1, self._free.popleft() if self._free else None
                self._freed.wait()
            return None


class _Files:
    """The file that a thread reads from, and its reads."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._entries = entries
        self._open: FileIO | None = None
        self._path: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()

    def read(self, piece: Piece, into: memoryview) -> None:
        """Read a piece into the first bytes of `into`.

        Raises:
            DamagedCheckpoint: a file cannot be read, or ends too early.
        """
        size = piece.last - piece.first
        entries = [self._entries[name] for name in piece.names]
        for at, entry in enumerate(entries):
            try:
                file = self._at(entry.file)
                if not at:
                    _announce(file, [other.offset + piece.first for other in entries if other.file == entry.file], size)
                got = _read_at(file, entry.offset + piece.first, into[at * size : (at + 1) * size])
            except OSError as error:
                told = f"{entry.file.name}: {entry.name} cannot be read: {error.strerror}"
                raise DamagedCheckpoint(str(entry.file.parent), [told]) from None
            if got < size:
                told = f"{entry.file.name}: {entry.name} needs {entry.nbytes} bytes, {piece.first + got} are there"
                raise DamagedCheckpoint(str(entry.file.parent), [told])

    def _at(self, path: Path) -> FileIO:
        if self._open is None or path != self._path:
            if self._open is not None:
                self._open.close()
            self._open, self._path = FileIO(str(path)), path
        return self._open


def _announce(file: FileIO, offsets: Sequence[int], size: int) -> None:
    """Let a disk begin with all of a piece, where the system takes such advice."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # it was advice
            for offset in offsets:
                os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_WILLNEED)


def _read_at(file: FileIO, offset: int, into: memoryview) -> int:
    """Read until `into` is full or the file ends; return the bytes that were read."""
    file.seek(offset)
    done = 0
    while done < len(into):
        got = file.readinto(into[done:])
        if not got:
            break
        done += got
    return done


def _pin(memory: torch.Tensor) -> None:
    """Lock memory for the copies of every GPU.

    Raises:
        MemoryError: the system does not lock so much.
    """
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 1))  # 1: of every GPU
    if status:
        raise MemoryError(f"{memory.nbytes:,} bytes of host memory cannot be pinned for a GPU: CUDA error {status}")


def _unpin(address: int, gpu: torch.device) -> None:
    with torch.cuda.device(gpu):
        torch.cuda.cudart().cudaHostUnregister(address)
