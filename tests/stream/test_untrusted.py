"""J-12 without a kernel: what is saved of a chat is text, whatever a model, a tool or a person wrote."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dsv4nb.stream.calls import Card
from dsv4nb.stream.transcript import Entry, Transcript

PAYLOADS = [it["text"] for it in json.loads((Path(__file__).parents[1] / "data/untrusted.json").read_text())]

ALLOWED = {
    "div": {"style", "class"},
    "details": {"style", "open"},
    "summary": {"style"},
    "pre": {"style"},
    "code": set(),
    "p": {"style"},
    "strong": set(),
    "em": set(),
    "br": set(),
}


class Reader(HTMLParser):
    """Collects what a page would be made of."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.wrong: list[str] = []
        self.values: set[str] = set()
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.wrong += [f"{tag}[{name}]" for name, _ in attrs if name not in ALLOWED.get(tag, set())]
        self.wrong += [tag] if tag not in ALLOWED else []
        self.values |= {value or "" for _, value in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.wrong.append(f"comment {data[:20]}")

    def handle_decl(self, decl: str) -> None:
        self.wrong.append(f"declaration {decl[:20]}")

    def handle_pi(self, data: str) -> None:
        self.wrong.append(f"instruction {data[:20]}")


def transcript(text: str) -> Transcript:
    """Return a chat that holds `text` in every place where something that is not ours can stand."""
    cards = tuple(
        Card(name=text, arguments=arguments, state=state, reason=text, result=text)
        for arguments, state in ((text, "failed"), (json.dumps({text: text}), "not_run"))
    )
    entry = Entry(user=text, reasoning=text, text=text, cards=cards, n_reasoning=1, n_tokens=1, note=text, error=text)
    return Transcript(title=text, turns=(entry, Entry(user=text, text=f"a\n```{text}\n{text}\n```\n{text}")))


def test_j12_a_saved_chat_is_made_of_our_elements_alone() -> None:
    ours = Reader(transcript("plain").bundle()["text/html"]).values
    for text in PAYLOADS:
        page = Reader(transcript(text).bundle()["text/html"])
        assert page.wrong == [], text
        assert page.values <= ours, text
        assert "".join(text.split()) in "".join(page.text.split()), "it is there to be read"


@pytest.mark.parametrize("html", ["<img src=x>", "<div onclick=x>", "<!-- a -->", "<!doctype html>", "<?x ?>"])
def test_what_the_reader_is_to_find_it_finds(html: str) -> None:
    assert Reader(html).wrong


def test_the_time_of_the_reasoning_is_saved_with_its_tokens() -> None:
    entry = Entry(user="q", reasoning="hm", text="a", n_reasoning=3, reasoning_s=2.14)
    saved = Transcript(turns=(entry,)).bundle()
    assert "[Thought for 3 tokens, 2.1 s]\n  hm" in saved["text/plain"]
    assert ">Thought for 3 tokens, 2.1 s</summary>" in saved["text/html"]
    assert entry.jsonable()["reasoning_s"] == 2.14
    assert Entry(user="q", n_reasoning=1).thought == "Thought for 1 token"
    assert Entry(user="q", n_reasoning=1, reasoning_s=0.01).thought == "Thought for 1 token"
