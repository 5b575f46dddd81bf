"""Threads that read ahead into a ring: every piece in its order, little memory, and an end at any time."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dsv4nb.checkpoint.headers import TensorEntry
from dsv4nb.errors import DamagedCheckpoint
from dsv4nb.weights import read_ahead
from dsv4nb.weights.pieces import Piece
from dsv4nb.weights.read_ahead import ReadAhead, Slot

SIZE = 64


@pytest.fixture
def entries(tmp_path: Path) -> dict[str, TensorEntry]:
    """Two hundred tensors of random bytes in three files."""
    found = {}
    for number in range(200):
        file = tmp_path / f"{number % 3}.bin"
        with file.open("ab") as out:
            found[f"t{number}"] = TensorEntry(
                name=f"t{number}", dtype="U8", shape=(SIZE,), file=file, offset=out.tell(), nbytes=SIZE
            )
            out.write(random.Random(number).randbytes(SIZE))
    return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Slot]:
    """The slots of a ring of three, as they are made."""
    slots: list[Slot] = []

    class Noted(Slot):
        def __init__(self, nbytes: int, gpu: Any) -> None:
            super().__init__(nbytes, gpu)
            slots.append(self)

    monkeypatch.setattr(read_ahead, "Slot", Noted)
    monkeypatch.setattr(read_ahead, "SLOTS", 3)
    monkeypatch.setattr(read_ahead, "THREADS", 5)
    return slots


def pieces_of(entries: dict[str, TensorEntry]) -> list[Piece]:
    """Two tensors each, without their first three bytes and their last."""
    names = list(entries)
    return [
        Piece(names=(a, b), row=0, first=3, last=SIZE - 1, holders=(0,))
        for a, b in zip(names[::2], names[1::2], strict=True)
    ]


def readers() -> int:
    return sum(thread.name.startswith("dsv4nb-read") for thread in threading.enumerate())


def test_pieces_come_in_order_through_a_small_ring(entries: dict[str, TensorEntry], made: list[Slot]) -> None:
    pieces = pieces_of(entries)
    with ReadAhead(entries, pieces) as ahead:
        for number, piece in enumerate(pieces):
            slot = ahead.take(number)
            numbers = [int(name[1:]) for name in piece.names]
            wanted = b"".join(random.Random(n).randbytes(SIZE)[3:-1] for n in numbers)
            assert bytes(slot.view[: piece.nbytes]) == wanted
            ahead.give_back(slot)
        assert len(made) <= 3 and {slot.bytes.nbytes for slot in made} == {2 * (SIZE - 4)}
    assert readers() == 0


def test_nothing_is_read_before_the_first_piece_is_wanted(entries: dict[str, TensorEntry], made: list[Slot]) -> None:
    with ReadAhead(entries, pieces_of(entries)) as ahead:
        assert not ahead.has(0) and readers() == 0
    assert made == []


def test_a_slot_is_read_into_after_its_copies(entries: dict[str, TensorEntry], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "SLOTS", 1)

    class Copy:
        def __init__(self) -> None:
            self.done = threading.Event()

        def synchronize(self) -> None:
            assert self.done.wait(5)

    copy: Any = Copy()
    with ReadAhead(entries, pieces_of(entries)) as ahead:
        slot = ahead.take(0)
        before = bytes(slot.view)
        slot.copies.append(copy)
        ahead.give_back(slot)
        time.sleep(0.02)
        assert not ahead.has(1) and bytes(slot.view) == before
        copy.done.set()
        assert ahead.take(1) is slot and bytes(slot.view) != before and slot.copies == []


@pytest.mark.parametrize("taken", [0, 1, 50])
def test_it_ends_wherever_its_user_is(entries: dict[str, TensorEntry], made: list[Slot], taken: int) -> None:
    with pytest.raises(ZeroDivisionError), ReadAhead(entries, pieces_of(entries)) as ahead:
        for number in range(taken):
            ahead.give_back(ahead.take(number))
        raise ZeroDivisionError
    assert readers() == 0


def test_a_file_that_ends_early_is_named_not_long_before_its_piece_is_wanted(
    entries: dict[str, TensorEntry], made: list[Slot]
) -> None:
    last = entries["t199"]
    os.truncate(last.file, last.offset + 20)
    pieces = pieces_of(entries)
    told = "1.bin: t199 needs 64 bytes, 20 are there"
    with pytest.raises(DamagedCheckpoint, match=told), ReadAhead(entries, pieces) as ahead:
        for number in range(len(pieces)):
            ahead.give_back(ahead.take(number))
    assert number >= len(pieces) - read_ahead.THREADS  # those before it may have been on their way yet
    assert readers() == 0


@pytest.mark.parametrize("number", [0, 77])
def test_an_error_of_the_disk_is_named(
    entries: dict[str, TensorEntry], made: list[Slot], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    read = read_ahead._read_at

    def broken(file: Any, offset: int, into: memoryview) -> int:
        if (Path(file.name), offset) == (entries[f"t{number}"].file, entries[f"t{number}"].offset + 3):
            raise OSError(5, "Input/output error")
        return read(file, offset, into)

    monkeypatch.setattr(read_ahead, "_read_at", broken)
    pieces = pieces_of(entries)
    told = f"t{number} cannot be read: Input/output error"
    with pytest.raises(DamagedCheckpoint, match=told), ReadAhead(entries, pieces) as ahead:
        for place in range(len(pieces)):
            ahead.give_back(ahead.take(place))
    assert readers() == 0


def test_no_memory_for_the_ring_ends_the_reading(
    entries: dict[str, TensorEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int, gpu: Any) -> Slot:
        raise MemoryError(f"no {nbytes} bytes")

    monkeypatch.setattr(read_ahead, "Slot", refuse)
    with pytest.raises(MemoryError, match="no 120 bytes"), ReadAhead(entries, pieces_of(entries)) as ahead:
        ahead.take(0)
    assert readers() == 0
