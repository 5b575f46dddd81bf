"""Rows of logits that stay on their device until somebody looks at one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import overload

import torch
from torch import Tensor

from dsv4nb.engine.protocol import Row


class LentRows(Sequence[Row]):
    """T rows of logits in a buffer that is going to be written again; copied to the host once, when one is asked for.

    Args:
        logits: [T, V] float32, written by what the current stream of its device was given.
        ready: recorded behind that, where the stream has been given more since; then `aside` copies.
    """

    def __init__(
        self, logits: Tensor, ready: torch.cuda.Event | None = None, aside: torch.cuda.Stream | None = None
    ) -> None:
        self._n, self._logits, self._device, self._ready = len(logits), logits, logits.device, ready
        self._stream = torch.cuda.current_stream(logits.device) if logits.is_cuda else None
        if ready is not None:
            self._stream = aside
        self._host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | Sequence[Row]:
        self.copy()
        assert self._host is not None
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        rows: Row = self._host.numpy()
        return rows[place]

    def recall(self) -> None:
        """Start the copy, and let the current stream, which is going to write the buffer, wait for it."""
        self.copy()
        if self._copied is not None and self._ready is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def copy(self) -> None:
        """Start the copy to the host, and wait for nothing; idempotent."""
        if self._host is not None:
            return
        logits, stream = self._logits, self._stream
        with torch.inference_mode(), nullcontext() if stream is None else torch.cuda.stream(stream):
            if stream is not None and self._ready is not None:
                stream.wait_event(self._ready)
            self._host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=stream is not None)
            self._host.copy_(logits, non_blocking=True)
            if stream is not None:
                self._copied = torch.cuda.Event()
                self._copied.record(stream)
        del self._logits


class Lender:
    """Lends rows of buffers that are written again and again."""

    def __init__(self) -> None:
        self._lent: list[weakref.ref[LentRows]] = []
        self._aside: torch.cuda.Stream | None = None

    def lend(self, logits: Tensor, ready: torch.cuda.Event | None = None) -> LentRows:
        """Return `logits`, [T, V], as rows that stay what they are.

        Args:
            ready: as `keep` returned it, of rows that are kept.
        """
        rows = LentRows(logits, ready, self._aside)
        self._lent.append(weakref.ref(rows))
        return rows

    def keep(self, logits: Tensor, room: Tensor) -> torch.cuda.Event | None:
        """Launch a copy of rows that are to be lent to where nothing else writes; return what tells that it is there.

        Whoever looks at a row then waits for nothing that was launched since.
        """
        self.recall()  # those that were kept before
        room.copy_(logits)
        if not logits.is_cuda:
            return None
        self._aside = self._aside or torch.cuda.Stream(logits.device)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(logits.device))
        return ready

    def recall(self) -> None:
        """Start the copies of what is still held, before the buffers are written again on the same stream."""
        lent, self._lent = self._lent, []
        for one in lent:
            if (rows := one()) is not None:
                rows.recall()
