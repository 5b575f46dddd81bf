from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from dsv4nb.events import Token
from dsv4nb.stream.transcript import Entry, Transcript, close_fence, entry_from_events, split_fences

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> [a](javascript:alert(3)) ![b](https://x.test/b.png)"


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def html(**entry: object) -> Tags:
    return Tags(Transcript(turns=(Entry(user="q", **entry),))._repr_html_())  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["user", "reasoning", "text", "tool", "error"])
def test_what_a_model_writes_is_data(field: str) -> None:
    page = Tags(Transcript(title=HOSTILE, turns=(Entry(**{"user": "q", field: HOSTILE}),))._repr_html_())  # type: ignore[arg-type]
    assert {tag for tag, _ in page.seen} <= {"div", "p", "strong", "br", "details", "summary", "pre", "code", "em"}
    assert all(set(attributes) <= {"class", "style"} for _, attributes in page.seen)
    assert page.open == []
    assert page.text.count(HOSTILE) == 2


def test_reasoning_is_folded_and_counted() -> None:
    page = html(reasoning="because", text="so", n_reasoning=1)
    assert "details" in [tag for tag, _ in page.seen]
    assert "Thought for 1 token" in page.text and "because" in page.text


@pytest.mark.parametrize(
    ("entry", "mark"),
    [
        ({"stop_reason": "cancelled"}, "Stopped"),
        ({"stop_reason": "length"}, "Reached the token limit"),
        ({"error": "out of memory"}, "Failed: out of memory"),
        ({"stop_reason": "stop"}, ""),
    ],
)
def test_a_stopped_answer_does_not_look_like_an_empty_one(entry: dict[str, str], mark: str) -> None:
    turn = Entry(user="q", **entry)  # type: ignore[arg-type]
    assert turn.mark == mark
    transcript = Transcript(turns=(turn,))
    assert mark in str(transcript) and mark in Tags(transcript._repr_html_()).text


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("plain", "plain"),
        ("```py\nx = 1\n```", "```py\nx = 1\n```"),
        ("see\n```py\nx = 1", "see\n```py\nx = 1\n```"),
        ("see\n```py\nx = 1\n", "see\n```py\nx = 1\n```"),
        ("a ``` inside a line", "a ``` inside a line"),
    ],
)
def test_an_unfinished_block_is_closed_for_display(text: str, closed: str) -> None:
    assert close_fence(text) == closed
    assert closed in str(Transcript(turns=(Entry(user="q", text=text, stop_reason="cancelled"),)))
    assert html(text=text).open == []


def test_code_is_a_block_of_its_own() -> None:
    assert split_fences("a\n```py\nx < 1\n```\nb") == [(False, "a"), (True, "x < 1"), (False, "b")]
    assert [tag for tag, _ in html(text="```\nx < 1").seen].count("pre") == 1


def test_the_text_is_readable_in_a_terminal() -> None:
    turn = Entry(user="What is 2 + 2?", reasoning="two\nand two", n_reasoning=3, text="4", stop_reason="stop")
    assert str(Transcript(title="toy", turns=(turn,))) == (
        "toy\n\nYou: What is 2 + 2?\n\n[Thought for 3 tokens]\n  two\n  and two\n\nModel: 4"
    )
    assert str(Transcript(turns=(turn,), prompts=False)) == "[Thought for 3 tokens]\n  two\n  and two\n\n4"
    assert str(Transcript()) == "(no messages)"


def test_an_entry_is_what_the_events_said() -> None:
    events = [
        Token(id=1, text="hm", channel="reasoning"),
        Token(id=2, text="</think>", channel="hidden"),
        Token(id=3, text="4", channel="content"),
        Token(id=None, text="!", channel="content"),
    ]
    entry = entry_from_events("q", events)
    assert (entry.reasoning, entry.text, entry.n_reasoning, entry.n_tokens) == ("hm", "4!", 1, 4)
    assert json.loads(json.dumps(Transcript(turns=(entry,)).jsonable()))[0]["text"] == "4!"


def test_speed_is_told_only_when_it_is_known() -> None:
    assert Entry(user="q").pace == ""
    assert Entry(user="q", n_tokens=1).pace == "1 token"
    assert Entry(user="q", n_tokens=30, seconds=1.5).pace == "30 tokens · 20.0 tok/s"
