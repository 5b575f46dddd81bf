"""A look inside: what a forward read and chose, and what a change of it does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy.typing as npt

from dsv4nb.events import Generation
from dsv4nb.handle.base import Handle
from dsv4nb.session.inspection import Inspection

if TYPE_CHECKING:
    from dsv4nb.session.inspecting import Change, HasIds


class Inside(Handle):
    """Watches and changes what happens inside the model."""

    @property
    def tap_names(self) -> tuple[str, ...]:
        """The places inside the model that `tap` and `inspect(keep=...)` know, in the order of a forward.

        "embed", "layers.N.middle" and "layers.N.out" are residual streams, [HC, D] per token; the inputs and outputs
        of attention and experts are [D].
        """
        return self._inside.names

    def tap(
        self, place: str, change: Change | npt.ArrayLike, *, tokens: int | Iterable[int] | None = None
    ) -> AbstractContextManager[None]:
        """Change what stands at a place inside the model, for the runs that are started in a `with` block.

        `inspect`, `generate`, `stream` and `submit` go through it, without speculation. Chats and batches are refused:
        what they compute stays for later runs.

        Args:
            place: one of `tap_names`.
            change: is given the rows [n, ...] of a forward as a float32 tensor of its own, and returns as many; None
                leaves them as they are. It runs on the serving thread, once per chunk of the prompt and once per new
                token. Or the rows themselves, to be put there.
            tokens: positions of the rows, ascending; all when None, for an array those from 0 on.

        Raises:
            RequestError: there is no such place, or rows and tokens are not as many; in the block, when `change`
                fails or returns something of another shape.
        """
        return self._inside.tap(place, change, tokens)

    def inspect(
        self,
        source: Generation | Sequence[int] | HasIds,
        *,
        turn: int | None = None,
        layers: int | slice | Iterable[int] | None = None,
        tokens: int | slice | Iterable[int] | None = None,
        per_head: bool = False,
        keep: str | Sequence[str] = (),
        attention: bool = True,
        logits: bool = True,
        lens: bool = False,
    ) -> Inspection:
        """Run a sequence again, behind what is in the queue, and tell what happened in it; an interrupt ends it.

        Args:
            source: a result, a chat, or ids, such as those of `tokenize`.
            turn: of the chat, as in `chat.turns`; its last one when None.
            layers, tokens: to watch, all when None; negative numbers count from the end.
            per_head: keep the attention of each head, not only the mean.
            keep: places whose activations are kept, of `tap_names`.
            attention: keep what was read, which takes most of the memory.
            logits: keep those behind each watched token.
            lens: keep what the head makes of the streams behind each watched layer.

        Raises:
            RequestError: something is not understood, or does not fit into memory; nothing was run.
        """
        return self._inside.inspect(
            source,
            turn=turn,
            layers=layers,
            tokens=tokens,
            per_head=per_head,
            keep=keep,
            attention=attention,
            logits=logits,
            lens=lens,
        )
