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
    """

    def __init__(self, logits: Tensor) -> None:
        self._n, self._logits = len(logits), logits
        self._stream = torch.cuda.current_stream(logits.device) if logits.is_cuda else None
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

    def copy(self) -> None:
        """Start the copy to the host, and wait for nothing; idempotent."""
        if self._host is not None:
            return
        logits, stream = self._logits, self._stream
        with torch.inference_mode(), nullcontext() if stream is None else torch.cuda.stream(stream):
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

    def lend(self, logits: Tensor) -> LentRows:
        """Return `logits`, [T, V], as rows that stay what they are."""
        rows = LentRows(logits)
        self._lent.append(weakref.ref(rows))
        return rows

    def recall(self) -> None:
        """Start the copies of what is still held, before the buffers are written again on the same stream."""
        lent, self._lent = self._lent, []
        for one in lent:
            if (rows := one()) is not None:
                rows.copy()
