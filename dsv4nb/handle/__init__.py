"""The handle on a loaded model: everything a person calls."""

from __future__ import annotations

from dsv4nb.handle.answering import Answering
from dsv4nb.handle.base import Parts
from dsv4nb.handle.chatting import Chatting
from dsv4nb.handle.inside import Inside

__all__ = ["Model", "Parts"]


class Model(Answering, Chatting, Inside):
    """A handle on a loaded model. Handles of the same checkpoint share one engine.

    Args:
        release: called once, when the handle is closed or forgotten.
    """
