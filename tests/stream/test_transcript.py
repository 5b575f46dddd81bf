from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from dsv4nb.events import Token, ToolCall
from dsv4nb.stream.calls import Card
from dsv4nb.stream.facts import RunFacts
from dsv4nb.stream.transcript import Entry, Transcript, close_fence, ended_entry, entry_from_events, split_fences

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


@pytest.mark.parametrize("field", ["user", "reasoning", "text", "error"])
def test_what_a_model_writes_is_data(field: str) -> None:
    page = Tags(Transcript(title=HOSTILE, turns=(Entry(**{"user": "q", field: HOSTILE}),))._repr_html_())  # type: ignore[arg-type]
    assert {tag for tag, _ in page.seen} <= {"div", "p", "strong", "br", "details", "summary", "pre", "code", "em"}
    assert all(set(attributes) <= {"class", "style"} for _, attributes in page.seen)
    assert page.open == []
    assert page.text.count(HOSTILE) == 2


@pytest.mark.parametrize("field", ["name", "arguments", "reason", "result"])
def test_what_stands_in_a_call_is_data(field: str) -> None:
    made = {"name": "f", "arguments": "{}", "state": "failed", field: HOSTILE}
    page = html(cards=(Card(**made),))  # type: ignore[arg-type]
    assert {tag for tag, _ in page.seen} <= {"div", "p", "strong", "br", "details", "summary", "pre", "code", "em"}
    assert all(set(attributes) <= {"class", "style", "open"} for _, attributes in page.seen)
    assert page.open == [] and HOSTILE in page.text


def test_a_call_stands_before_the_answer_and_folds_what_is_long() -> None:
    card = Card(name="f", arguments='{"a":1}', state="answered", result="21")
    long = Card(name="g", arguments=json.dumps({"lines": list(range(40))}), state="unanswered")
    turn = Entry(user="q", text="It is 21.", cards=(card, long))
    told = str(Transcript(turns=(turn,)))
    assert told.startswith('You: q\n\n[Call] f({"a":1}) → 21\n\n[Call] g(') and told.endswith("\n\nModel: It is 21.")
    page = html(text="It is 21.", cards=(card, long))
    assert [dict(attributes).get("open", "no") for tag, attributes in page.seen if tag == "details"] == [
        None,
        "no",
        "no",
    ]
    assert "f · answered" in page.text and "g · no result" in page.text and "Result · 21" in page.text


def test_a_call_that_was_cut_off_is_told_without_its_markup() -> None:
    entry = ended_entry("q", [Token(id=1, text="<markup", channel="tool")])
    assert (entry.is_calling, entry.stop_reason) == (True, "cancelled")
    told = Transcript(turns=(entry,))
    assert str(told) == "You: q\n\n[An incomplete tool call]\n\n[Stopped]"
    assert "An incomplete tool call" in told._repr_html_() and "markup" not in told._repr_html_()
    whole = entry_from_events("q", [Token(id=1, text="<m", channel="tool"), ToolCall(id="a", name="f", arguments="{}")])
    assert (whole.is_calling, [card.state for card in whole.cards]) == (False, ["running"])


def test_a_turn_that_answers_calls_says_nothing_for_the_person() -> None:
    told = Transcript(turns=(Entry(user="", text="It is 21."),))
    assert str(told) == "Model: It is 21." and "You" not in told._repr_html_()


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


def test_the_footer_tells_what_was_cached_and_how_the_reply_was_speculated() -> None:
    told = {"user": "q", "n_tokens": 30, "seconds": 1.5, "n_cached": 12}
    assert Entry(**told, speculated="speculated, τ 5.29").pace == (  # type: ignore[arg-type]
        "30 tokens · 12 cached · 20.0 tok/s · speculated, τ 5.29"
    )
    both = Entry(**told, speculated="speculated", note="plain: no faster")  # type: ignore[arg-type]
    assert both.pace.endswith("tok/s · speculated, then plain: no faster")
    assert both.jsonable()["footer"] == both.pace


def test_the_footer_tells_how_tokens_were_chosen_and_when_the_first_came() -> None:
    run = RunFacts(choice="sampled, seed 42", first_token_s=0.0034, phases=())
    told = Entry(user="q", n_tokens=30, seconds=1.5, runs=(replace(run, choice="greedy", first_token_s=0.243), run))
    assert told.pace == "30 tokens · 20.0 tok/s · sampled, seed 42 · first token 243 ms"
    assert Entry(user="q", n_tokens=1, runs=(replace(run, first_token_s=None),)).pace == "1 token · sampled, seed 42"


def test_a_turn_that_was_running_when_it_was_saved_says_so() -> None:
    told = Transcript(turns=(Entry(user="q", is_running=True),))
    assert str(told) == "You: q\n\nModel: \n\n[Not finished when this was saved]"
