"""Stored tensors → each rank's part of them on its device, in an order that is known ahead: from files, or made up.

From files: threads read ahead (`read_ahead`). What was read is copied on a stream beside the one that packs, and copies
of what comes next are under way while a batch is packed. Tensors belong to whoever takes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from dsv4nb.checkpoint.headers import TensorEntry
from dsv4nb.weights.pieces import Batch, Piece, Span, pieces_of
from dsv4nb.weights.placement import Part, Placement
from dsv4nb.weights.read_ahead import SLOT_BYTES, ReadAhead, Slot
from dsv4nb.weights.reader import DTYPES, TensorSource

AHEAD_BYTES = 256 << 20  # on the GPUs, of batches that are copied before they are taken

Names = tuple[str, ...]


class Parts(Protocol):
    """Where a loader takes each rank's part of stored tensors from."""

    bytes_read: int

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def take(self, names: Names) -> list[Tensor | None]:
        """Return each rank's part of tensors that are alike, under each other: [len(names), *shape of the part]."""
        ...


class MadeParts:
    """Parts of what a source makes or reads, one tensor at a time.

    Attributes:
        bytes_read: of the tensors taken so far, as stored.
    """

    def __init__(self, source: TensorSource, placement: Placement, devices: Sequence[torch.device]) -> None:
        self._source, self._placement, self._devices = source, placement, devices
        self.bytes_read = 0

    def __enter__(self) -> Self:
        self._source.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._source.__exit__(kind, error, trace)

    def take(self, names: Names) -> list[Tensor | None]:
        """Return each rank's part of tensors that are alike, under each other: [len(names), *shape of the part]."""
        found: list[list[Tensor]] = [[] for _ in self._devices]
        for name in names:
            tensor = self._source.read(name)
            for own, part, device in zip(found, self._placement.parts(name), self._devices, strict=True):
                if part is not None:
                    own.append(tensor[part.index].to(device))
            del tensor
        self.bytes_read = self._source.bytes_read
        return [_under_each_other(own) if own else None for own in found]


class FileParts:
    """Parts of tensors that lie in files, which are taken in the order of `batches`.

    Args:
        entries: where the tensors lie.
        batches: in the order in which they are taken.
        devices: one for each rank.

    Attributes:
        bytes_read: of the tensors taken so far, as stored.
    """

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        batches: Sequence[Batch],
        devices: Sequence[torch.device],
    ) -> None:
        self._entries, self._batches, self._devices = entries, batches, devices
        self._pieces: list[Piece] = []
        self._ends: list[int] = []  # of the pieces of each batch
        for batch in batches:
            self._pieces += pieces_of(batch, SLOT_BYTES)
            self._ends.append(len(self._pieces))
        gpus = {device: None for device in devices if device.type == "cuda"}
        self._streams = {device: torch.cuda.Stream(device) for device in gpus}
        self._ahead = ReadAhead(entries, self._pieces, gpu=next(iter(gpus), None))
        self._sent: dict[int, _Sent] = {}  # batches that are on the devices, and not taken
        self._taken = 0  # batches
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._ahead:  # whatever happens
            for stream in self._streams.values():
                stream.synchronize()  # before the memory that is copied, or copied to, is anything else
            self._sent.clear()

    def take(self, names: Names) -> list[Tensor | None]:
        """Return each rank's part of tensors that are alike, under each other: [len(names), *shape of the part].

        Raises:
            DamagedCheckpoint: a file cannot be read, or ends too early.
            torch.OutOfMemoryError: a GPU has no room.
        """
        number = self._taken
        assert self._batches[number].names == names, (self._batches[number].names, names)
        sent = self._sent.pop(number) if number in self._sent else self._send(number)
        self._taken += 1
        self._send_what_is_read()
        for device, event in sent.copied.items():
            torch.cuda.current_stream(device).wait_event(event)
        self.bytes_read += self._batches[number].nbytes
        parts = zip(sent.tensors, self._batches[number].parts, strict=True)
        return [None if tensor is None or part is None else _cut(tensor, part) for tensor, part in parts]

    def _send_what_is_read(self) -> None:
        """Begin to copy the next batches, as far as they are read and there is room for them."""
        if not self._streams:
            return
        number, room = self._taken, AHEAD_BYTES
        while number < len(self._batches) and (room := room - self._batches[number].copied_bytes) >= 0:
            if number not in self._sent:
                if not all(self._ahead.has(piece) for piece in self._pieces_of(number)):
                    return
                self._sent[number] = self._send(number)
            number += 1

    def _send(self, number: int) -> _Sent:
        """Copy a batch to the devices, waiting for what is not read yet."""
        batch = self._batches[number]
        sent = _Sent([self._room(batch, rank) for rank in range(len(self._devices))])
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))  # whose kernels may still use what was freed
        for place in self._pieces_of(number):
            piece, slot = self._pieces[place], self._ahead.take(place)
            read = slot.bytes[: piece.nbytes].view(len(piece.names), -1)
            for rank in piece.holders:
                self._copy(read, _place_of(piece, sent.tensors[rank], batch.spans[rank]), slot, rank)
            self._ahead.give_back(slot)
        sent.copied = {device: stream.record_event() for device, stream in self._streams.items()}
        return sent

    def _pieces_of(self, number: int) -> range:
        return range(self._ends[number - 1] if number else 0, self._ends[number])

    def _room(self, batch: Batch, rank: int) -> Tensor | None:
        part = batch.parts[rank]
        if part is None:
            return None
        entry = self._entries[batch.names[0]]
        shape = entry.shape if part.axis else part.shape
        return torch.empty((len(batch.names), *shape), dtype=DTYPES[entry.dtype], device=self._devices[rank])

    def _copy(self, read: Tensor, to: Tensor, slot: Slot, rank: int) -> None:
        stream = self._streams.get(self._devices[rank])
        if stream is None:
            to.copy_(read)
            return
        with torch.cuda.stream(stream):
            to.copy_(read, non_blocking=True)
        slot.copies.append(stream.record_event(torch.cuda.Event(blocking=True)))


class _Sent:
    """A batch on its way.

    Attributes:
        tensors: of each rank, None where it holds nothing.
        copied: what is behind the copies, by GPU.
    """

    def __init__(self, tensors: list[Tensor | None]) -> None:
        self.tensors = tensors
        self.copied: dict[torch.device, torch.cuda.Event] = {}


def _place_of(piece: Piece, tensor: Tensor | None, span: Span | None) -> Tensor:
    """Return where a piece goes, as bytes of each of its tensors."""
    assert tensor is not None and span is not None
    rows = tensor.view(tensor.shape[0], -1).view(torch.uint8)
    return rows[piece.row : piece.row + len(piece.names), piece.first - span[0] : piece.last - span[0]]


def _cut(tensor: Tensor, part: Part) -> Tensor:
    """Cut columns out of rows."""
    return tensor[(slice(None), *part.index)].contiguous() if part.axis else tensor


def _under_each_other(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]
