from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dsv4nb.errors import ChatBusy, RequestError
from dsv4nb.session.tree import Tree, Turn

MakeModel = Callable[..., Any]


@pytest.fixture
def chat(make_model: MakeModel) -> Any:
    chat = make_model([f"reply {i}" for i in range(1, 10)]).chat()
    for text in ("a", "b", "c"):
        chat.send(text)
    return chat


def said(chat: Any) -> list[tuple[str, str]]:
    return [(turn.user, turn.text) for turn in chat.turns]


def test_regenerate_is_a_branch_with_the_same_message(chat: Any) -> None:
    assert chat.regenerate().text == "reply 4"
    assert said(chat) == [("a", "reply 1"), ("b", "reply 2"), ("c", "reply 4")]
    assert [m["content"] for m in chat.messages] == ["a", "reply 1", "b", "reply 2", "c", "reply 4"]
    assert len(chat.branches) == 2
    chat.switch(3)
    assert said(chat)[-1] == ("c", "reply 3")


def test_edit_replaces_a_turn_and_drops_what_followed_from_this_branch(chat: Any) -> None:
    assert chat.edit(1, "other").text == "reply 4"
    assert said(chat) == [("a", "reply 1"), ("other", "reply 4")]
    chat.send("more")
    assert [node.number for node in chat.branches.leaves] == [3, 5]
    with pytest.raises(RequestError, match="turn is 3; this branch has turns 0 to 2") as caught:
        chat.edit(3, "x")
    assert caught.value.param == "turn"


def test_rewind_keeps_the_first_turns(chat: Any) -> None:
    chat.rewind(turn=1)
    assert said(chat) == [("a", "reply 1")]
    chat.send("new")
    assert said(chat) == [("a", "reply 1"), ("new", "reply 4")]
    chat.rewind(turn=0)
    assert chat.messages == [] and len(chat.branches.nodes) == 4
    for bad in (3, -1, True, "1"):
        with pytest.raises(RequestError, match="this branch has 0 turns to keep"):
            chat.rewind(turn=bad)


def test_a_fork_and_its_origin_do_not_know_of_each_other(chat: Any) -> None:
    other = chat.fork()
    other.send("there")
    chat.send("here")
    assert [turn.user for turn in other.turns] == ["a", "b", "c", "there"]
    assert [turn.user for turn in chat.turns] == ["a", "b", "c", "here"]
    assert len(chat.branches.nodes) == len(other.branches.nodes) == 4


def test_the_tree_can_be_read(chat: Any) -> None:
    chat.edit(1, "other")
    chat.regenerate()
    chat.send("more", max_new=1)
    chat.rewind(0)
    chat.send("another beginning")
    chat.switch(6)
    assert repr(chat.branches).splitlines() == [
        "○ ├─ 1. a → reply 1",
        "  │  ├─ 2. b → reply 2",
        "  │  │  3. c → reply 3",
        "  │  ├─ 4. other → reply 4",
        "○ │  └─ 5. other → reply 5",
        "● │     6. more → reply [cut]",
        "  └─ 7. another beginning → reply 7",
    ]
    assert repr(Tree().branches) == "no turns yet"


def test_a_refused_edit_changes_nothing(chat: Any) -> None:
    before = said(chat)
    for options in ({"temperature": "hot"}, {"nothing": 1}):
        with pytest.raises(RequestError):
            chat.edit(0, "x", **options)
    with pytest.raises(RequestError):
        chat.edit(0, "")
    assert said(chat) == before and not chat.is_busy


def test_a_failed_branch_leaves_the_other_one_whole(make_model: MakeModel) -> None:
    chat = make_model(["one", "two"], prefill_faults={1: RuntimeError("lost")}).chat()
    chat.send("a")
    with pytest.raises(Exception, match="lost"):
        chat.regenerate()
    assert [turn.error is None for turn in chat.turns] == [False] and chat.messages == []
    chat.switch(1)
    assert [m["content"] for m in chat.messages] == ["a", "one"]


def test_nothing_moves_while_a_turn_runs(make_model: MakeModel) -> None:
    chat = make_model(["one", "word " * 300], delay_s=0.002).chat()
    chat.send("a")
    ticket = chat.submit("b")
    for move in (chat.regenerate, chat.fork, lambda: chat.rewind(0), lambda: chat.switch(1), lambda: chat.edit(0, "x")):
        with pytest.raises(ChatBusy):
            move()
    ticket.cancel()
    ticket.wait()


def test_a_turn_that_answered_calls_has_no_text_to_send_again() -> None:
    tree = Tree()
    tree.add(Turn(user=""), ())
    with pytest.raises(RequestError, match="turn is 2; the chat has turns 1 to 1"):
        tree.node(2)
    with pytest.raises(RequestError, match="no turns yet"):
        Tree().nth(0)


def test_n_cached_and_reasoning_are_written_down(make_model: MakeModel) -> None:
    chat = make_model("one two three</think>four").chat(thinking=True)
    chat.send("a")
    assert chat.turns[0].n_reasoning == 3 and chat.turns[0].n_cached == 0


def test_a_branch_is_entered_again_where_it_was_left(chat: Any) -> None:
    chat.edit(1, "other")
    chat.send("more")
    chat.switch(2, where_left=True)
    assert said(chat) == [("a", "reply 1"), ("b", "reply 2"), ("c", "reply 3")]
    chat.rewind(2)
    chat.switch(4, where_left=True)
    assert said(chat)[1:] == [("other", "reply 4"), ("more", "reply 5")]
    chat.switch(2, where_left=True)
    assert said(chat) == [("a", "reply 1"), ("b", "reply 2")], "it was left after a rewind"


def test_a_branch_that_nobody_has_been_on_is_entered_at_its_newest_end(chat: Any) -> None:
    chat.edit(1, "other")
    chat.switch(1)
    tree = Tree(chat.branches.nodes, chat.branches.head)  # as from a file
    assert [tree.left_at(tree.node(n)).number for n in (1, 2, 3, 4)] == [1, 3, 3, 4]


def test_each_turn_of_a_branch_knows_what_stands_in_its_place(chat: Any) -> None:
    chat.edit(1, "other")
    chat.regenerate()
    assert [(node.number, siblings) for node, siblings in chat.branches.path()] == [(1, [1]), (5, [2, 4, 5])]
    assert Tree().branches.path() == []


def test_a_fork_can_begin_with_the_first_turns(chat: Any) -> None:
    assert said(chat.fork(1)) == [("a", "reply 1")] and chat.fork(0).turns == []
    assert len(chat.fork(1).branches.nodes) == 3 and len(chat.turns) == 3
    with pytest.raises(RequestError, match="turn is 4; this branch has 3 turns to keep"):
        chat.fork(4)


def test_an_edit_can_be_started_without_waiting(chat: Any) -> None:
    ticket = chat.submit_edit(0, "other")
    assert ticket.result(5).text == "reply 4" and said(chat) == [("other", "reply 4")]
    assert chat.submit_edit(-1).result(5).text == "reply 5" and said(chat) == [("other", "reply 5")]
