"""Commands of a page: each is carried out once, and answered as often as it comes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from dsv4nb.errors import Dsv4Error
from dsv4nb.widgets import protocol

KEPT_ANSWERS = 256  # a page repeats a command seconds after it, not hundreds of commands later


class Orders:
    """Carries out commands that have an `id`, on one thread.

    Args:
        send: takes a message to the page.
        do: by kind, what carries a command out; an error of dsv4nb is a refusal, told in its own words.
    """

    def __init__(
        self, send: Callable[[dict[str, Any]], None], do: Mapping[str, Callable[[dict[str, Any]], None]]
    ) -> None:
        self._send, self._do = send, do
        self._answers: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def obey(self, command: dict[str, Any]) -> None:
        """Carry out a command, or repeat the answer to it.

        Raises:
            Exception: what is no refusal; the page was told.
        """
        key = command["id"]
        if key in self._answers:
            self._send(self._answers[key])
            return
        try:
            self._do[command["kind"]](command)
        except Dsv4Error as error:
            self._answer(key, str(error))
        except Exception as error:
            self._answer(key, f"{type(error).__name__}: {error}")
            raise
        else:
            self._answer(key, "")

    def _answer(self, key: str, error: str) -> None:
        self._answers[key] = protocol.message("ack", id=key, ok=not error, error=error)
        while len(self._answers) > KEPT_ANSWERS:
            self._answers.popitem(last=False)
        self._send(self._answers[key])
