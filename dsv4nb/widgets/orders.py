"""Commands of a page: each is carried out once, and answered as often as it comes."""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from dsv4nb.errors import Dsv4Error
from dsv4nb.widgets import protocol

Do = Callable[[dict[str, Any]], bool | None]

KEPT_ANSWERS = 256  # a page repeats a command seconds after it, not hundreds of commands later
MOST_TRACE = 20_000  # characters; what a deep recursion leaves is told from its end


class Orders:
    """Carries out commands that have an `id`, on one thread.

    Args:
        send: takes a message to the page.
        do: by kind, what carries a command out; it returns False when `answer` will be called later. An error of
            dsv4nb is a refusal, told in its own words.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None], do: Mapping[str, Do]) -> None:
        self._send, self._do = send, do
        self._answers: OrderedDict[str, dict[str, Any] | None] = OrderedDict()  # None: not answered yet

    def __contains__(self, key: str) -> bool:
        """Whether a command has come, or was answered before it came."""
        return key in self._answers

    def obey(self, command: dict[str, Any]) -> None:
        """Carry out a command, or repeat the answer to it.

        Raises:
            Exception: what is no refusal; the page was told.
        """
        key = command["id"]
        if key in self._answers:
            if (answer := self._answers[key]) is not None:
                self._send(answer)
            return
        self._answers[key] = None
        try:
            is_answered = self._do[command["kind"]](command)
        except Dsv4Error as refusal:
            self.answer(key, refusal)
        except Exception as fault:
            self.answer(key, fault)
            raise
        else:
            if is_answered is not False:
                self.answer(key)

    def answer(self, key: str, error: str | Exception = "") -> None:
        """Answer a command, now and whenever it comes again; one that has not come yet is not carried out."""
        words, trace = told(error) if isinstance(error, Exception) else (error, "")
        self._answers[key] = answer = protocol.message("ack", id=key, ok=not error, error=words, trace=trace)
        while len(self._answers) > KEPT_ANSWERS:
            self._answers.popitem(last=False)
        self._send(answer)


def told(error: Exception) -> tuple[str, str]:
    """Return an error in words, and where it comes from: "" for a refusal, whose words say it all."""
    if isinstance(error, Dsv4Error):
        return str(error), ""
    words = "".join(traceback.format_exception_only(error)).strip()
    return words, "".join(traceback.format_exception(error))[-MOST_TRACE:]
