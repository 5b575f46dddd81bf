"""The page that explains the protocol explains all of it; and the kernel's side of snapshot and delta."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsv4nb.stream.frames as frames
import dsv4nb.widgets.protocol as protocol
from dsv4nb.events import Event, PromptUsage, Round, Token
from dsv4nb.stream.frames import Frame, Watch
from dsv4nb.testing.recording import Recording

PAGE = (Path(frames.__file__).parent / "PROTOCOL.md").read_text(encoding="utf-8")
SCRIPT = (Path(protocol.__file__).parent / "js/protocol.js").read_text(encoding="utf-8")
RECORDING = Path(__file__).parents[1] / "data/recording.json"

TABLES = {name: value for name, value in vars(protocol).items() if name.endswith(("FROM_KERNEL", "FROM_PAGE"))}
CONSTANTS = {name: value for name, value in vars(protocol).items() if name.isupper() and not name.startswith("_")}


def section_of(table: str) -> str:
    """The part of the page under the second-level heading that holds a table."""
    found = [part for part in PAGE.split("\n## ") if f"(`{table}`)" in part]
    assert len(found) == 1, f"PROTOCOL.md must have `({table})` in exactly one section; it is in {len(found)}"
    return found[0]


def rows_of(table: str) -> dict[str, tuple[tuple[str, ...], str]]:
    """The rows of a table on the page: kind -> (fields, meaning)."""
    section = section_of(table)
    lines = section[section.index(f"(`{table}`)") :].split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("| kind |")) + 2
    rows = {}
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        kind, fields, meaning = (cell.strip() for cell in line.strip("|").split("|"))
        rows[kind.strip("`")] = (tuple(re.findall(r"`(\w+)`", fields)), meaning)
    return rows


def explained(section: str) -> set[str]:
    """The fields that bullets explain: those in the section, and those that several panels have."""
    common = next(part for part in PAGE.split("\n## ") if part.startswith("Fields that several panels have"))
    bullets = re.findall(r"^- (.+(?:\n  .+)*)", f"{common}\n{section}", re.MULTILINE)
    return {name for bullet in bullets for name in re.findall(r"`(\w+)`", bullet)}


def test_every_kind_of_message_is_a_row_and_no_row_is_left_over() -> None:
    missing = [f"{table}: {kind}" for table, kinds in TABLES.items() for kind in kinds if kind not in rows_of(table)]
    surplus = [f"{table}: {kind}" for table, kinds in TABLES.items() for kind in rows_of(table) if kind not in kinds]
    assert not missing, f"PROTOCOL.md has no row for {', '.join(missing)}"
    assert not surplus, f"PROTOCOL.md has rows that nobody declares: {', '.join(surplus)}"


def test_every_row_names_the_declared_fields_and_says_what_the_message_means() -> None:
    wrong = []
    for table, kinds in TABLES.items():
        rows = rows_of(table)
        for kind, fields in kinds.items():
            told, meaning = rows.get(kind, ((), "-"))
            if told != tuple(fields):
                wrong.append(f"{table}, {kind}: the page has {', '.join(told) or 'none'}, declared {', '.join(fields)}")
            if len(meaning) < 4:
                wrong.append(f"{table}, {kind}: no meaning")
    assert not wrong, "\n".join(wrong)


def test_every_field_is_explained() -> None:
    missing = []
    for table, kinds in TABLES.items():
        known = explained(section_of(table))
        missing += [f"{table}, {kind}: {name}" for kind, names in kinds.items() for name in names if name not in known]
    assert not missing, "PROTOCOL.md does not explain " + "; ".join(missing)


@pytest.mark.parametrize("name", sorted(CONSTANTS))
def test_both_sides_declare_the_same(name: str) -> None:
    found = re.search(rf"export const {name} = ([\[{{].*?[\]}}]);", SCRIPT, re.DOTALL)
    assert found, f"protocol.js declares no {name}"
    assert json.loads(found[1]) == json.loads(json.dumps(CONSTANTS[name]))


def test_numbers_of_the_page_are_those_of_the_code() -> None:
    from dsv4nb.widgets.orders import KEPT_ANSWERS

    commands = (Path(protocol.__file__).parent / "js/commands.js").read_text(encoding="utf-8")
    repeat, silent = (int(re.search(rf"const {name} = (\d+);", commands)[1]) for name in ("REPEAT_MS", "SILENT_MS"))  # type: ignore[index]
    said = " ".join(PAGE.split())
    assert f"no answer after {repeat // 1000} seconds" in said and f"after {silent // 1000} seconds says" in said
    assert f"the last {KEPT_ANSWERS} answers" in said and f"at most {frames.FRAMES_PER_S} stream messages" in said
    for letter, channel in protocol.CHANNELS.items():
        assert f"`{letter}` {channel}" in said


# the kernel's side


class Growing:
    """A run whose events are there up to a point."""

    state = "running"

    def __init__(self, events: list[Event]) -> None:
        self.events, self.there, self.is_over = events, 0, False

    def poll(self, start: int) -> tuple[list[Event], bool]:
        return self.events[start : self.there], self.is_over


def _events(rng: random.Random) -> Iterator[Event]:
    yield PromptUsage(n_prompt=3, n_cached=0)
    recorded: list[Round] = list(Recording.open(RECORDING).replies[0].rounds)
    for i in range(300):
        yield Token(id=None if rng.random() < 0.1 else i, text=f"t{i} ", channel="content")
        if rng.random() < 0.2:
            yield rng.choice(recorded)


class Page:
    """What the rules of the page make of frames: the reference that both sides are held to."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.is_lost = False

    def frame(self, message: dict[str, object]) -> None:
        start, tokens = message["start"], [text for _, text in message["tokens"]]  # type: ignore[attr-defined]
        assert isinstance(start, int)
        if start > len(self.shown):
            self.is_lost = True
            return
        self.shown += tokens[len(self.shown) - start :]

    def snapshot(self, texts: list[str]) -> None:
        if len(texts) >= len(self.shown):
            self.shown = texts
        self.is_lost = False


@pytest.mark.parametrize("seed", range(25))
def test_whatever_is_lost_repeated_or_late_a_page_shows_a_beginning_of_the_run(seed: int) -> None:
    rng = random.Random(seed)
    run = Growing(list(_events(rng)))
    texts = [event.text for event in run.events if isinstance(event, Token)]
    sent: list[Frame] = []
    watch = Watch(1, run, lambda news: None)
    page, wire = Page(), list[dict[str, object]]()
    while not watch.over:
        run.there = min(len(run.events), run.there + rng.randrange(7))
        run.is_over = run.there == len(run.events)
        fresh = [one for one in watch.news() if isinstance(one, Frame)]
        sent += fresh
        for one in fresh:
            wire += [one.message()] * rng.choice((0, 1, 1, 1, 2))
        if rng.random() < 0.2 and wire:
            wire.append(rng.choice(wire))  # late
        if rng.random() < 0.1:
            rng.shuffle(wire)
        while wire and rng.random() < 0.8:
            page.frame(wire.pop(0))
            assert page.shown == texts[: len(page.shown)]
        if page.is_lost and rng.random() < 0.5:
            there = sum(isinstance(event, Token) for event in run.events[: run.there])
            page.snapshot(texts[:there])
    starts = [one.start for one in sent]
    assert starts == [sum(len(other.tokens) for other in sent[:i]) for i in range(len(sent))]
    assert [text for one in sent for _, text in one.tokens] == texts, "joined, the frames are the run"
    page.snapshot(texts)
    assert page.shown == texts


def test_bytes_grow_linearly_with_the_reply() -> None:
    def cost(n: int) -> int:
        run = Growing([Token(id=i, text="four", channel="content") for i in range(n)])
        watch, total = Watch(1, run, lambda news: None), 0
        for there in range(0, n + 1, 10):
            run.there = there
            total += sum(len(json.dumps(one.message())) for one in watch.news() if isinstance(one, Frame))
        return total

    assert cost(4000) < 4.2 * cost(1000) and cost(4000) / 4000 < 25
