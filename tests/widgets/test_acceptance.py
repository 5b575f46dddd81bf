from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import dsv4nb.widgets.protocol as protocol
from dsv4nb.errors import ChatBusy, RequestError
from dsv4nb.events import Event, Token
from dsv4nb.model import Model
from dsv4nb.rounds import Costs, Draft, DraftStatus, Placed, Round, Rounds
from dsv4nb.stream.frames import Pump
from dsv4nb.testing.fake_engine import FakeTokenizer
from dsv4nb.testing.fake_model import fake_model
from dsv4nb.widgets.acceptance import AcceptancePanel
from dsv4nb.widgets.acceptance_figures import figures_of, wire_rounds
from dsv4nb.widgets.acceptance_saved import SavedRounds
from dsv4nb.widgets.acceptance_story import PLAIN, STOPPED, Reader, story_of_rounds, story_of_turn

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>"


def draft(k: int, status: DraftStatus, conf: float | None = 0.8, **other: Any) -> Draft:
    made: dict[str, Any] = {
        "id": 100 + k,
        "text": f" d{k}",
        "pos": 11 + k,
        "conf_logit": None if conf is None else math.log(conf / (1 - conf)),
        "conf": conf,
        "survival": None if conf is None else conf ** (k + 1),
        "margin": 1.5,
        "q": 0.25,
        "p": 0.5,
        "target_choice": {"accepted": 100 + k, "rejected": 7}.get(status),
        "status": status,
    }
    return Draft(**made | other)


def round_of(number: int = 0, accepts: int = 2, *, block: int = 4, conf: float | None = 0.8, **other: Any) -> Round:
    """A round that verified its whole block."""
    statuses: list[DraftStatus] = ["accepted"] * accepts + ["rejected"] * (accepts < block)
    statuses += ["unreached"] * (block - len(statuses))
    made: dict[str, Any] = {
        "round": number,
        "start": 10,
        "pending": Placed(id=1, text="p", pos=10),
        "drafts": tuple(draft(k, status, conf) for k, status in enumerate(statuses)),
        "vt_drafts": block,
        "t_cap": block + 1,
        "t_batch": block + 1,
        "accepts": accepts,
        "next": Placed(id=7, text=" n", pos=11 + accepts),
        "kind": "bonus" if accepts == block else "correction",
        "emitted": accepts + 1,
        "stop": None,
        "mode": "exact",
        "proposal": "coupled",
        "ms": {"draft": 3.0, "verify": 8.0, "commit": 0.5, "total": 12.0},
        "plain_ms": 7.0,
        "window_reason": "all drafts",
    }
    return Round(**made | other)


class HandTicket:
    """A run whose events are put in by hand."""

    def __init__(self, *events: Event) -> None:
        self.state, self.events, self.finished = "running", list(events), False

    def poll(self, start: int) -> tuple[Sequence[Event], bool]:
        is_over = self.finished  # before the events are read: none may be missed
        return self.events[start:], is_over

    def play(self, round: Round) -> None:
        self.events += [Token(id=i, text=f"t{round.round} ", channel="content") for i in range(round.emitted)]
        self.events.append(round)


def speaking(*replies: str, wrong: int = 3, **options: Any) -> Model:
    """A model whose drafts are right but for every third one; the words of a reply must differ."""
    tokens = FakeTokenizer()
    scripts = [tokens.encode_trusted(reply) for reply in replies]

    def drafts(before: tuple[int, ...]) -> list[int]:
        script = next((script for script in scripts if before[-1] in script), [])
        if not script:
            return [1] * 5
        at = script.index(before[-1]) + 1
        return [token if (at + i) % wrong else token + 1 for i, token in enumerate(script[at : at + 5])]

    logits = (2.0, 1.5, 0.5, -0.2, -1.0)
    return fake_model(scripts, tokenizer=tokens, drafts=drafts, conf_logits=logits, **options)


def words(n: int, letter: str = "w") -> str:
    return " ".join(f"{letter}{i}" for i in range(n))


@pytest.fixture
def panel_of(open_panel: Callable[..., AcceptancePanel]) -> Callable[..., AcceptancePanel]:
    return partial(open_panel, AcceptancePanel)


@pytest.fixture
def chat() -> Iterator[Any]:
    model = speaking(words(12), words(9, "v"))
    yield model.chat(temperature=0)
    model.close()


def tell(panel: AcceptancePanel, kind: str, **fields: Any) -> list[dict[str, Any]]:
    """Send as the page would; return what it brought."""
    before = len(panel.comm.messages())
    panel.comm.from_page({"kind": kind, **fields})
    settle(panel)
    return list(panel.comm.messages()[before:])


def ask_sweep(panel: AcceptancePanel, key: str, run: int) -> dict[str, Any]:
    """Ask for the sweep and wait for it; it is computed beside the pump."""
    (ack,) = [message for message in tell(panel, "sweep", id=key, run=run) if message["kind"] == "ack"]
    assert ack["ok"]
    deadline = time.monotonic() + 5
    while not (told := panel.comm.messages("sweep")):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return dict(told[-1])


def settle(panel: AcceptancePanel) -> None:
    deadline = time.monotonic() + 5
    assert panel._pump.drain()
    while (watch := panel._watch) is not None and not watch.has_read_all():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert panel._pump.drain()


def streamed(panel: AcceptancePanel) -> list[list[Any]]:
    """The rounds of the last run as a page puts them together, which must be told in order and once."""
    rounds: list[list[Any]] = []
    for message in panel.comm.messages():
        if message["kind"] == "snapshot":
            rounds = list(message["rounds"])
        elif message["kind"] == "frame":
            assert message["start"] == len(rounds)
            rounds += message["rounds"]
    return rounds


def test_a_round_travels_with_exactly_its_fields() -> None:
    (told,) = wire_rounds(story_of_rounds(Rounds([round_of()])))
    assert len(told) == len(protocol.ROUND)
    assert all(len(one) == len(protocol.DRAFT) for one in told[protocol.ROUND.index("drafts")])
    assert [one[2] for one in told[4]] == ["a", "a", "r", "u"]
    assert [one[1] for one in told[4]] == [" d0", " d1", " n", None], "what the model chose in each place"


def test_numbers_that_json_lacks_travel_as_others() -> None:
    drafts = (draft(0, "accepted", margin=math.inf), draft(1, "rejected", p=math.nan))
    (told,) = wire_rounds(story_of_rounds([round_of(accepts=1, drafts=drafts)]))
    assert told[4][0][5] > 1e299 and told[4][1][7] is None
    json.dumps(told, allow_nan=False)


def test_a_choice_whose_text_nobody_knows_is_told_by_its_id() -> None:
    drafts = (draft(0, "accepted"), draft(1, "past_stop", target_choice=55))
    (told,) = wire_rounds(story_of_rounds([round_of(accepts=1, drafts=drafts, next=None)]))
    assert told[4][1][1] == "token 55"


def test_j20_a_live_reply_arrives_in_frames_and_never_as_a_trait(panel_of: Any) -> None:
    ticket = HandTicket()
    panel = panel_of(ticket)
    rounds = [round_of(i, i % 5) for i in range(20)]
    for one in rounds:
        ticket.play(one)
        settle(panel)
    ticket.finished = True
    settle(panel)
    assert [told[1] for told in streamed(panel)] == list(range(20))
    frames = [message for message in panel.comm.messages("frame") if message["rounds"]]
    assert len(frames) > 5
    (ended,) = panel.comm.messages("ended")
    assert ended["note"] == "" and ended["rewinds"] is False
    states = [data["state"] for kind, data in panel.comm.published if kind == "comm_msg" and data["method"] == "update"]
    assert all(set(state) <= {"title"} for state in states)
    assert panel.comm.messages("frame")[-1]["figures"] == figures_of(rounds).message()


def test_j20_500_rounds_drop_nothing_and_cost_little(panel_of: Any) -> None:
    """A tenth of the time that they would take at 60 a second; what a frame costs is counted in the lab."""
    panel, spent = panel_of(ticket := HandTicket(), pump=Pump(rate=30)), []
    clock = lambda: spent.append(time.thread_time())  # noqa: E731
    panel._pump.call(clock)
    start = time.monotonic()
    for i in range(500):
        ticket.play(round_of(i, i % 5))
        time.sleep(max(0.0, start + i / 600 - time.monotonic()))
    ticket.finished = True
    deadline = time.monotonic() + 10
    while not panel.comm.messages("ended"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    took = time.monotonic() - start
    panel._pump.call(clock)
    panel._pump.drain()
    assert [told[1] for told in streamed(panel)] == list(range(500))
    frames = panel.comm.messages("frame")
    assert len(frames) <= 30 * took + 2
    assert spent[1] - spent[0] < 0.05 * 500 / 60
    sent = [len(json.dumps(frame["rounds"])) for frame in frames]
    assert sum(sent) < 500 * 600, "bytes in proportion to the rounds"


def test_a_late_view_gets_everything_once(panel_of: Any) -> None:
    panel = panel_of(ticket := HandTicket())
    for i in range(3):
        ticket.play(round_of(i))
    settle(panel)
    (snapshot,) = [m for m in tell(panel, "resync") if m["kind"] == "snapshot"]
    assert [told[1] for told in snapshot["rounds"]] == [0, 1, 2] and snapshot["live"]
    ticket.play(round_of(3))
    settle(panel)
    assert panel.comm.messages("frame")[-1]["start"] == 3


def test_the_text_before_each_round_is_the_chats_own() -> None:
    for reply in (words(12), "a1 a2 a3 a4 a5 a6</think>b1 b2 b3 b4 b5"):
        model = speaking(reply)
        own = model.chat(temperature=0, thinking="</think>" in reply)
        ticket = own.submit("hi")
        ticket.wait()
        reader = Reader(ticket, "hi")
        reader.read()
        (turn,) = own.turns
        assert len(turn.rounds) > 2
        assert reader.shown.before == story_of_turn(turn).before
        for i, (n_reasoning, n_text) in enumerate(turn.marks):
            pieces = reader.shown.before[: i + 1]
            assert "".join(piece[0] for piece in pieces) == turn.reasoning[:n_reasoning]
            assert "".join(piece[1] for piece in pieces) == turn.text[:n_text]
        model.close()


def test_thoughts_of_another_run_are_a_paragraph_before_its_round_too() -> None:
    def look() -> str:
        """Look outside."""
        return "rain"

    call = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    model = speaking(f"a1 a2 a3 a4</think>{call}", "b1 b2 b3</think>c1 c2 c3")
    own = model.chat(temperature=0, thinking=True, tools=[look])
    ticket = own.submit("hi")
    ticket.wait()
    reader = Reader(ticket, "hi")
    reader.read()
    (turn,) = own.turns
    assert turn.reasoning == "a1 a2 a3 a4\n\nb1 b2 b3" and len(turn.runs) == 2
    assert reader.shown.before == story_of_turn(turn).before and set(reader.shown.replies) == {0, 1}
    assert any("\n\nb" in thought for thought, _ in reader.shown.before)
    model.close()


def test_rounds_alone_tell_their_own_text(chat: Any) -> None:
    whole = chat.send("hi")
    story = story_of_rounds(whole.rounds)
    assert ["".join(piece[1] for piece in story.before[: i + 1]) for i in range(len(whole.rounds))] == [
        chat.turns[0].text[:n] for _, n in chat.turns[0].marks
    ]


def test_two_replies_pooled_are_told_apart() -> None:
    story = story_of_rounds(Rounds([round_of(0), round_of(1), round_of(0)]))
    assert story.replies == [0, 0, 1]
    assert [piece[1] for piece in story.before] == ["p", " d0 d1 n", "p"]


def test_a_chats_turns_are_followed_and_any_can_be_chosen(panel_of: Any, chat: Any) -> None:
    panel = panel_of(chat)
    chat.send("one")
    settle(panel)
    assert len(streamed(panel)) == len(chat.turns[0].rounds) == 4
    chat.send("two")
    settle(panel)
    assert len(streamed(panel)) == len(chat.turns[1].rounds) == 3
    listed = panel.comm.messages("turns")[-1]
    assert listed["turns"] == [[0, "one", 4], [1, "two", 3]] and listed["shown"] == 1 and listed["follows"]
    tell(panel, "show", id="a-1", turn=0)
    assert len(streamed(panel)) == 4
    chat.send("three")
    settle(panel)
    assert len(streamed(panel)) == 4, "a turn that was chosen stays"
    assert len(panel.comm.messages("turns")[-1]["turns"]) == 3
    tell(panel, "show", id="a-2", turn=-1)
    assert panel.comm.messages("turns")[-1]["shown"] == 2
    (ack,) = [m for m in tell(panel, "show", id="a-3", turn=9) if m["kind"] == "ack"]
    assert not ack["ok"] and "3 turns" in ack["error"]


def test_a_panel_that_comes_in_the_middle_of_a_turn_follows_it(panel_of: Any) -> None:
    model = speaking(words(40), delay_s=0.03)
    chat = model.chat(temperature=0)
    ticket = chat.submit("hi")
    while not any(isinstance(event, Round) for event in ticket.poll(0)[0]):
        time.sleep(0.01)
    panel = panel_of(chat)
    ticket.wait()
    settle(panel)
    assert len(streamed(panel)) == len(chat.turns[0].rounds)
    assert panel.comm.messages("turns")[-1]["shown"] == 0
    model.close()


def test_rewind_goes_back_to_the_round_once(panel_of: Any, chat: Any) -> None:
    panel = panel_of(chat)
    whole = chat.send("hi")
    settle(panel)
    run = panel.comm.messages("ended")[-1]["run"]
    for _ in range(2):
        told = tell(panel, "rewind", id="a-1", run=run, round=2)
        acks = [m for m in told if m["kind"] == "ack"]
        assert acks == [{"kind": "ack", "id": "a-1", "ok": True, "error": "", "trace": ""}]
    (turn,) = chat.turns
    assert turn.rounds == whole.rounds[:2] and turn.stop_reason == "cancelled"
    assert len(chat.branches.nodes) == 2, "a repeated command has one effect"
    assert len(streamed(panel)) == 2
    run = panel.comm.messages("snapshot")[-1]["run"]
    tell(panel, "rewind", id="a-2", run=run, round=0)
    assert panel.comm.messages("snapshot")[-1]["note"] == STOPPED and chat.turns[0].text == "w0"


def test_rewind_while_a_turn_runs_is_refused_in_the_chats_words(panel_of: Any) -> None:
    model = speaking(words(40), delay_s=0.03)
    chat = model.chat(temperature=0)
    panel = panel_of(chat)
    ticket = chat.submit("hi")
    while not panel.comm.messages("frame"):
        time.sleep(0.01)
    run = panel.comm.messages("frame")[-1]["run"]
    panel.comm.from_page({"kind": "rewind", "id": "a-1", "run": run, "round": 0})
    assert panel._pump.drain()
    (ack,) = panel.comm.messages("ack")
    assert ack["error"] == str(ChatBusy())
    ticket.cancel()
    ticket.wait()
    settle(panel)
    model.close()


def test_rewind_of_what_is_no_longer_there_is_refused(panel_of: Any, chat: Any) -> None:
    panel = panel_of(chat)
    chat.send("hi")
    settle(panel)
    run = panel.comm.messages("ended")[-1]["run"]
    chat.reset()
    (ack,) = [m for m in tell(panel, "rewind", id="a-1", run=run, round=0) if m["kind"] == "ack"]
    assert not ack["ok"] and "another branch" in ack["error"]
    panel = panel_of(Rounds([round_of()]))
    (ack,) = tell(panel, "rewind", id="a-1", run=1, round=0)
    assert not ack["ok"] and "no chat" in ack["error"]


def test_a_branch_changed_in_python_is_seen_at_once(panel_of: Any, chat: Any) -> None:
    panel = panel_of(chat)
    chat.send("hi")
    settle(panel)
    chat.rewind(round=1)
    settle(panel)
    assert len(panel.comm.messages("snapshot")[-1]["rounds"]) == 1
    assert panel.comm.messages("turns")[-1]["turns"] == [[0, "hi", 1]]
    chat.reset()
    settle(panel)
    last = panel.comm.messages("snapshot")[-1]
    assert (last["rounds"], last["label"], last["rewinds"]) == ([], "", False)
    assert panel.comm.messages("turns")[-1]["turns"] == []


def test_a_turn_that_was_chosen_stays_while_its_branch_does(panel_of: Any, chat: Any) -> None:
    panel = panel_of(chat)
    for _ in range(3):
        chat.send("hi")
    settle(panel)
    tell(panel, "show", id="a-1", turn=0)
    n_shown = len(panel.comm.messages("snapshot"))
    chat.rewind(2)
    settle(panel)
    assert len(panel.comm.messages("snapshot")) == n_shown
    assert [panel.comm.messages("turns")[-1][name] for name in ("shown", "follows")] == [0, False]
    assert len(panel.comm.messages("turns")[-1]["turns"]) == 2


def test_the_sweep_is_that_of_the_rounds(panel_of: Any, chat: Any) -> None:
    costs = Costs(draft=3.0, verify=(6, 6.5, 7, 7.5, 8, 8.5))
    rounds = chat.send("hi").rounds
    panel = panel_of(rounds, costs=costs)
    told = ask_sweep(panel, "a-1", 1)
    assert told["n"] == len(rounds) and told["note"] == ""
    for point, own in zip(told["points"], rounds.sweep(costs=costs), strict=True):
        assert (point["tau"], point["rows"], point["unknown"]) == (own.spec.tau, own.rows, own.unknown)
        assert (tuple(point["tokens"]), point["departures"]) == (own.tokens, own.departures)
        assert tuple(point["ms_per_token"]) == own.ms_per_token
    tell(panel, "sweep", id="a-2", run=7)
    assert [thread.name for thread in threading.enumerate() if thread.name == "dsv4nb-sweep"] == [], "not shown"
    panel._say_if_shown(7, "sweep", n=1, points=[], note="")
    assert len(panel.comm.messages("sweep")) == 1


def test_rounds_without_confidences_have_no_sweep_and_say_why(panel_of: Any) -> None:
    panel = panel_of(Rounds([round_of(conf=None)]))
    told = ask_sweep(panel, "a-1", 1)
    assert told["points"] == [] and "confidence" in told["note"]


def test_figures_are_the_totals_under_their_exact_names() -> None:
    rounds = Rounds([round_of(i, i % 5) for i in range(10)])
    figures, totals = figures_of(rounds), rounds.totals
    assert [fact.name for fact in figures.facts] == [
        *("draft acceptance rate", "mean acceptance length", "verify rate", "tokens/round"),
        *("ms/round", "tok/s", "speed-up"),
    ]
    assert figures.facts[0].value == "50.0 %" and figures.facts[0].hint == "20 accepted of 40 verified drafts"
    assert figures.facts[1].value == "3.00" and figures.facts[3].value == "3.00"
    assert dict(figures.curves)["of reached"] == totals.position_rates_conditional
    assert figures.confidence == rounds.calibration().conf


def test_a_plain_reply_says_that_it_has_no_rounds(panel_of: Any) -> None:
    model = fake_model("hello there")
    panel = panel_of(chat := model.chat())
    chat.send("hi")
    settle(panel)
    assert panel.comm.messages("ended")[-1]["note"] == PLAIN
    assert PLAIN in str(panel.saved()) and PLAIN in panel.saved()._repr_html_()
    model.close()


def test_every_source_is_shown(panel_of: Any, chat: Any) -> None:
    generation = chat.send("hi")
    for source in (chat, generation, generation.rounds):
        panel = panel_of(source)
        tell(panel, "resync")
        assert len(streamed(panel)) == len(generation.rounds)
    with pytest.raises(RequestError, match="source is a str"):
        AcceptancePanel("rounds")  # type: ignore[arg-type]


def test_a_closed_panel_follows_nobody(chat: Any) -> None:
    panel = AcceptancePanel(chat, pump=Pump(rate=500))
    comm = panel.comm
    panel.close()
    said = len(comm.published)
    chat.send("hi")
    panel._pump.drain()
    assert len(comm.published) == said and chat._callbacks == []


def test_j11_the_saved_page_reads_without_widgets(panel_of: Any, chat: Any) -> None:
    panel = panel_of(chat)
    chat.send(HOSTILE)
    settle(panel)
    bundle, _ = panel._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == panel.model_id
    text, page = bundle["text/plain"], bundle["text/html"]
    for fact in figures_of(chat.turns[0].rounds).facts:
        assert fact.name in text and fact.value in text and fact.name in page and fact.value in page
    assert "draft 1  ███" in text and "<svg" in page and "Rounds 0 to 3" in page
    assert "<script" not in page and "<img" not in page and "http:" not in page.replace("http://www.w3.org/", "")


def test_j11_the_picture_has_every_slot_and_says_what_it_leaves_out() -> None:
    def saved(n: int) -> SavedRounds:
        return SavedRounds(title="t", label="", note="", rounds=tuple(round_of(i, i % 5) for i in range(n)))

    page = saved(100)._repr_html_()
    told = [int(n) for n in re.findall(r"(\d+) accepted", "".join(re.findall(r'aria-label="[^"]*"', page)))]
    assert sum(told) == 200
    assert saved(100)._left_out == "" and "1,000 of 1,200 rounds" in str(saved(1200))
    assert len(saved(1000)._repr_html_()) < 300_000


def test_j11_the_output_is_refreshed_when_a_reply_ends(
    panel_of: Any, chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, Any]] = []

    class Recorded:
        def __init__(self, bundle: dict[str, Any]) -> None:
            shown.append(bundle)

        def update(self, bundle: dict[str, Any]) -> None:
            shown.append(bundle)

    monkeypatch.setattr("dsv4nb.widgets.panel.Output", Recorded)
    panel = panel_of(chat)
    panel._ipython_display_()
    chat.send("hi")
    settle(panel)
    assert "<svg" in shown[-1]["text/html"] and 'class="dsv4-rounds-saved"' in shown[-1]["text/html"]
    assert len(shown) <= 4, "once when it begins, once when it ends"


def test_handlers_leave_everything_to_the_pump(panel_of: Any, chat: Any) -> None:
    chat.send("hi")
    panel = panel_of(chat)
    threads = []
    send = panel.send
    panel.send = lambda *told: (threads.append(threading.current_thread().name), send(*told))
    for i, kind in enumerate(("resync", "sweep", "show")):
        tell(panel, kind, id=f"a-{i}", run=1, turn=0)
    assert set(threads) == {"dsv4nb-pump"}


@pytest.mark.parametrize(
    "content",
    [
        {"kind": "rewind", "id": "a", "run": 1},
        {"kind": "rewind", "id": "a", "run": 1, "round": True},
        {"kind": "show", "id": 4, "turn": 0},
        {"kind": "send", "id": "a", "text": "a chat's"},
        None,
    ],
)
def test_what_is_none_of_ours_is_ignored(content: object) -> None:
    assert protocol.parse(content, protocol.ROUNDS_FROM_PAGE) is None


def test_a_failed_reply_keeps_its_rounds_and_says_why(panel_of: Any) -> None:
    model = speaking(words(40), faults={6: RuntimeError("out of memory")})
    panel = panel_of(chat := model.chat(temperature=0))
    ticket = chat.submit("hi")
    ticket.wait()
    settle(panel)
    ended = panel.comm.messages("ended")[-1]
    assert "out of memory" in ended["note"] and story_of_turn(chat.turns[0]).note == ended["note"]
    assert len(streamed(panel)) == len(chat.turns[0].rounds) > 0
    model.close()


def test_the_style_and_the_script_need_no_network() -> None:
    for text in (str(AcceptancePanel._esm), str(AcceptancePanel._css)):
        told = text.replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in told and "https:" not in told and "@import" not in told and "import(" not in told
        assert "innerHTML" not in told


def test_a_mode_that_changes_texts_is_told(panel_of: Any) -> None:
    panel = panel_of(Rounds([replace(round_of(), mode="rejection")]))
    assert [m["mode"] for m in tell(panel, "resync") if m["kind"] == "snapshot"] == ["rejection"]
