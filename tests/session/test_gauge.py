from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dsv4nb.errors import PromptTooLong, RequestError
from dsv4nb.session.chat import Chat
from dsv4nb.session.gauge import Room
from dsv4nb.session.limits import SLACK

MakeModel = Callable[..., Any]


def test_the_rule_in_words() -> None:
    room = Room(used=1203, max_seq=4096)
    assert (room.left, str(room)) == (2797, "1,203 of 4,096 positions used; a reply can have 2,797")
    assert room.plus(2797).left == 0 and "no reply fits any more" in str(room.plus(2797))


def test_the_room_is_what_the_next_prompt_takes(make_model: MakeModel) -> None:
    chat = make_model(["Fine.</think>Hello there.", "Yes."], max_seq=256).chat(system="Be brief.", thinking=True)
    for text in ("Hi there", "Really now?"):
        told = chat.room(text)
        reply = chat.send(text)
        assert told.used == reply.done.n_prompt and told.max_seq == 256
    assert chat.room("x").used == chat.room().plus(chat.count("x")).used


def test_what_is_left_is_what_a_reply_can_have(make_model: MakeModel) -> None:
    chat = make_model("a " * 300, max_seq=256).chat()
    left = chat.room("Go on").left
    assert chat.send("Go on").done.n_tokens == left == 256 - SLACK - chat.turns[0].runs[0].n_prompt
    assert chat.room().left == 0
    with pytest.raises(PromptTooLong):
        chat.send("More?")


def test_a_chat_without_a_model_cannot_count(make_model: MakeModel) -> None:
    chat = Chat(make_model()._turns())
    for call in (chat.room, lambda: chat.count("a")):
        with pytest.raises(RequestError, match="no model to count tokens with"):
            call()
