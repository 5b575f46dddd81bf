"""The lens's kernel half: what it tells a page, what a page can ask of it, and what a saved notebook keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4nb.errors import RequestError
from dsv4nb.events import TokenLogprob
from dsv4nb.handle import Model
from dsv4nb.session.chat import Chat
from dsv4nb.stream.frames import Pump
from dsv4nb.testing.fake_model import fake_model
from dsv4nb.testing.recording import Recording
from dsv4nb.testing.replaying import replay_model
from dsv4nb.widgets import protocol
from dsv4nb.widgets.lens import TokenLens
from dsv4nb.widgets.lens_reply import N_TOP, Reply, arrays_of, reply_of_result, sums_of, visible
from dsv4nb.widgets.lens_saved import MOST, SavedLens, level_of, probability

RECORDING = Recording.open(Path(__file__).parents[1] / "data/recording.json")
STORY, SUM, CAPITAL, AGAIN, CONTINUED = RECORDING.replies
ASKED = "Tell me a story about a dragon and a clock."


@pytest.fixture
def player() -> Iterator[Model]:
    with replay_model(RECORDING, speed=math.inf) as model:
        yield model


class Page:
    """What a lens tells its page, and what the page makes of it."""

    def __init__(self, lens: TokenLens) -> None:
        self.lens = lens
        self.told: list[tuple[dict[str, Any], list[memoryview]]] = []
        lens.send = self._sent  # type: ignore[method-assign]
        lens._orders._send = self._sent
        self._numbers = iter(range(1000))

    def _sent(self, content: dict[str, Any], buffers: Any = None) -> None:
        self.told.append((content, buffers or []))

    def messages(self, kind: str) -> list[dict[str, Any]]:
        return [message for message, _ in self.told if message["kind"] == kind]

    def ask(self, kind: str, **fields: Any) -> str:
        key = f"p-{next(self._numbers)}"
        self.lens._received(None, {"kind": kind, "id": key, **fields}, [])
        return key

    def answer(self, key: str) -> dict[str, Any]:
        """Wait for the answer to a command."""
        return self.wait(lambda: next((one for one in self.messages("ack") if one["id"] == key), None))

    def resync(self) -> dict[str, Any]:
        n = len(self.messages("snapshot"))
        self.lens._received(None, {"kind": "resync"}, [])
        self.wait(lambda: len(self.messages("snapshot")) > n)
        return self.messages("snapshot")[-1]

    def wait(self, found: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 20
        while not (it := found()):
            assert time.monotonic() < deadline, [message for message, _ in self.told][-5:]
            time.sleep(0.005)
        return it

    def ids(self) -> list[int]:
        """The tokens that a page shows, from the last snapshot on."""
        first = max(i for i, (message, _) in enumerate(self.told) if message["kind"] == "snapshot")
        run = self.told[first][0]["run"]
        shown: list[int] = []
        texts: dict[int, str] = {}
        for message, buffers in self.told[first:]:
            if message["kind"] in ("snapshot", "frame") and message["run"] == run:
                start = message.get("start", 0)
                assert start <= len(shown)
                texts |= dict(message["texts"])
                fresh = np.frombuffer(buffers[0], "<i4").tolist() if message["n"] else []
                shown = shown[:start] + fresh
                assert all(token in texts for token in shown)
        return shown


def lens_of(source: Any, model: Any = None) -> Page:
    return Page(TokenLens(source, model, pump=Pump(rate=500)))


def settled(page: Page, n: int) -> None:
    page.wait(lambda: not page.resync()["live"] and len(page.ids()) == n)


def story(player: Model, **options: Any) -> Chat:
    chat = player.chat(**{"logprobs": 5, **options})
    chat.send(ASKED)
    return chat


def test_tokens_of_a_turn_travel_as_buffers_and_each_text_once(player: Model) -> None:
    page = lens_of(story(player))
    told = page.resync()
    assert (told["n"], told["k"], told["continues"], told["scores"]) == (len(STORY.ids), 5, True, False)
    (buffers,) = [b for message, b in page.told if message is told]
    ids, made, logprobs, entropies, ranks, top_ids, top_logprobs = (
        np.frombuffer(buffer, kind)
        for buffer, kind in zip(buffers, ("<i4", "u1", "<f4", "<f4", "<i4", "<i4", "<f4"), strict=True)
    )
    assert tuple(ids) == STORY.ids
    assert logprobs == pytest.approx([place.logprob for place in STORY.places], rel=1e-5, abs=1e-6)
    assert entropies == pytest.approx([place.entropy for place in STORY.places], abs=1e-4)
    assert ranks.tolist() == [place.rank for place in STORY.places]
    assert top_ids.reshape(-1, 5)[3].tolist() == [token for token, _ in STORY.places[3].top]
    assert top_logprobs.shape == (5 * len(ids),)
    how = [protocol.MADE[one] for one in made]
    accepted = sum(one.accepts for one in STORY.rounds)
    assert how[0] == "first" and how.count("accepted") in (accepted, accepted - 1)
    assert how.count("correction") == sum(one.kind == "correction" and one.next is not None for one in STORY.rounds)
    texts = dict(told["texts"])
    assert len(told["texts"]) == len(texts) and "".join(texts[i] for i in STORY.ids) == player.decode(STORY.ids)


def test_a_running_reply_comes_in_frames_and_nothing_is_told_twice() -> None:
    with replay_model(RECORDING, rate=60) as player:
        chat = player.chat(logprobs=3)
        page = lens_of(chat)
        page.resync()
        ticket = chat.submit(ASKED)
        page.wait(lambda: page.messages("frame"))
        ticket.result()
        page.wait(lambda: page.messages("ended"))
        frames = page.messages("frame")
        assert len(frames) > 5 and page.ids() == list(STORY.ids)
        first = max(i for i, (message, _) in enumerate(page.told) if message["kind"] == "snapshot")
        told = [token for message, _ in page.told[first:] for token, _ in message.get("texts", ())]
        assert len(told) == len(set(told))
        assert page.messages("ended")[-1]["continues"] is True
        assert page.lens.saved().reply.made == Page(TokenLens(chat)).lens.saved().reply.made, "as it is remembered"


def test_a_view_that_comes_in_the_middle_has_all_of_it() -> None:
    with replay_model(RECORDING, rate=40) as player:
        chat = player.chat(logprobs=3)
        ticket = chat.submit(ASKED)
        while len(ticket.poll(0)[0]) < 20:
            time.sleep(0.005)
        page = lens_of(chat)
        page.wait(lambda: page.resync()["live"] and page.ids())
        ticket.result()
        page.wait(lambda: page.messages("ended"))
        assert page.ids() == list(STORY.ids)


def test_an_alternative_is_continued_on_a_fork_and_back(player: Model) -> None:
    chat = story(player)
    chat.regenerate()
    page = lens_of(chat)
    run = page.resync()["run"]
    token = len(CONTINUED.given) - 1
    ack = page.answer(page.ask("continue", run=run, token=token, alternative=CONTINUED.given[token]))
    assert ack["ok"], ack
    settled(page, len(CONTINUED.ids))
    assert page.ids() == list(CONTINUED.ids)
    assert len(chat.forks) == 1 and page.lens.chat is chat.forks[0]
    fork = page.lens.chat
    assert fork.turns[0].text.startswith(player.decode(CONTINUED.given)) and len(fork.turns[0].logprobs) == len(
        CONTINUED.ids
    )
    assert page.lens.saved().reply.made[: token + 1] == ["given"] * (token + 1)
    assert chat.turns[0].ids == AGAIN.ids and len(chat.branches) == 2
    assert page.resync()["fork"], "the page says where it is"
    assert page.answer(page.ask("back"))["ok"]
    settled(page, len(AGAIN.ids))
    assert page.lens.chat is chat and page.resync()["fork"] == ""
    refused = page.answer(page.ask("back"))
    assert not refused["ok"] and "nothing to go back to" in refused["error"]


def test_what_the_model_refuses_is_told_in_its_words(player: Model) -> None:
    chat = story(player)
    page = lens_of(chat)
    run = page.resync()["run"]
    refused = page.answer(page.ask("continue", run=run, token=3, alternative=STORY.ids[0]))
    assert not refused["ok"] and "this recording has no reply to" in refused["error"]
    refused = page.answer(page.ask("continue", run=run, token=999, alternative=1))
    assert "token is 999; the reply has tokens 0 to" in refused["error"]
    refused = page.answer(page.ask("continue", run=run + 9, token=1, alternative=1))
    assert "on the branch that is shown" in refused["error"]
    assert chat.forks == [] and page.lens.chat is chat


def test_a_busy_chat_is_not_forked() -> None:
    with fake_model("one two three four " * 50, delay_s=0.02) as model:
        chat = model.chat()
        chat.send("hi", max_new=3)
        page = lens_of(chat)
        ticket = chat.submit("again")
        page.answer(page.ask("show", turn=0))
        refused = page.answer(page.ask("continue", run=page.resync()["run"], token=1, alternative=9))
        assert "busy" in refused["error"]
        ticket.cancel()


def test_probabilities_are_computed_once_and_shown(player: Model) -> None:
    chat = story(player, logprobs=None)
    page = lens_of(chat)
    told = page.resync()
    assert told["scores"] and told["k"] == 0
    key = page.ask("score", run=told["run"])
    assert page.answer(key)["ok"]
    told = page.resync()
    assert (told["scores"], told["scoring"], told["k"]) == (False, False, N_TOP)
    assert [one.rank for one in page.lens.saved().reply.scores] == [place.rank for place in STORY.places]
    page.lens._received(None, {"kind": "score", "id": key, "run": told["run"]}, [])
    page.resync()
    assert [one["ok"] for one in page.messages("ack") if one["id"] == key] == [True, True], "answered again, done once"
    refused = page.answer(page.ask("score", run=told["run"]))
    assert "have their probabilities" in refused["error"]


def test_a_fault_of_the_engine_is_told_and_can_be_tried_again() -> None:
    with fake_model("one two three", prefill_faults={1: ValueError("broken")}) as model:
        result = model.generate("hi")
        page = lens_of(result, model)
        refused = page.answer(page.ask("score", run=page.resync()["run"]))
        assert not refused["ok"] and "ValueError: broken" in refused["error"]
        assert page.answer(page.ask("score", run=page.resync()["run"]))["ok"]
        assert page.lens.saved().reply.is_scored


def test_a_result_and_a_ticket_are_shown_with_their_model(player: Model) -> None:
    result = player.chat(logprobs=2).send(ASKED)
    with pytest.raises(RequestError, match=r"TokenLens\(result, model\)"):
        TokenLens(result)
    page = lens_of(result, player)
    told = page.resync()
    assert (told["n"], told["k"], told["continues"], told["label"]) == (len(STORY.ids), 2, False, ASKED)
    refused = page.answer(page.ask("continue", run=told["run"], token=1, alternative=1))
    assert "only a reply of a chat" in refused["error"]
    bare = lens_of(player.chat().send(ASKED), player)
    assert bare.answer(bare.ask("score", run=bare.resync()["run"]))["ok"]
    assert bare.resync()["k"] == N_TOP
    ticket = player.submit(prompt_ids=SUM.prompt, logprobs=1)
    page = lens_of(ticket, player)
    ticket.result()
    settled(page, len(SUM.ids))
    with pytest.raises(RequestError, match="source is a str; it must be a chat, a ticket or a generation"):
        TokenLens("text", player)  # type: ignore[arg-type]


def test_turns_can_be_chosen_and_a_branch_is_followed(player: Model) -> None:
    chat = story(player)
    chat.send("What is 47 + 38?", thinking=True)
    page = lens_of(chat)
    page.resync()
    assert page.messages("turns")[-1]["turns"] == [[0, ASKED, len(STORY.ids)], [1, "What is 47 + 38?", len(SUM.ids)]]
    assert page.answer(page.ask("show", turn=0))["ok"] and page.ids() == list(STORY.ids)
    assert page.messages("turns")[-1]["follows"] is False
    assert "this branch has 2 turns" in page.answer(page.ask("show", turn=7))["error"]
    assert page.answer(page.ask("show", turn=-1))["ok"] and page.ids() == list(SUM.ids)
    chat.rewind(1)
    page.wait(lambda: page.ids() == list(STORY.ids))
    chat.rewind(0)
    page.wait(lambda: page.messages("snapshot")[-1]["n"] == 0)


def test_turns_that_have_no_tokens_say_why() -> None:
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    with fake_model("x", faults={0: ValueError("broken")}) as model:
        chat = model.chat(messages=history)
        page = lens_of(chat)
        told = page.resync()
        assert told["note"] == "The token ids of this turn are not known: it came as text." and told["n"] == 0
        chat.submit("hi").wait()
        page.wait(lambda: "broken" in page.resync()["note"])


def test_a_turn_with_calls_shows_its_last_run() -> None:
    calls = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'

    def f() -> str:
        """Do it."""
        return "done"

    with fake_model([calls, "It is done."]) as model:
        chat = model.chat(tools=[f], temperature=0)
        page = lens_of(chat)
        page.resync()
        chat.send("hi")
        page.wait(lambda: page.messages("ended"))
        told = page.resync()
        assert told["note"] == "This turn made calls; shown is its last run." and told["continues"] is False
        texts = dict(told["texts"])
        assert "".join(texts[token] for token in page.ids()) == "It is done."
        assert page.lens.saved().reply.is_scored is False


def test_a_closed_lens_follows_nothing(player: Model) -> None:
    chat = player.chat()
    page = lens_of(chat)
    page.resync()
    page.lens.close()
    n = len(page.told)
    chat.send(ASKED)
    time.sleep(0.05)
    assert len(page.told) == n


# values


def scored(*logprobs: float, made: str = "plain") -> Reply:
    scores = [TokenLogprob(id=i, logprob=lp, rank=1, entropy=0.5, top=((i, lp),)) for i, lp in enumerate(logprobs)]
    ids = list(range(len(logprobs)))
    return Reply(label="q", ids=ids, made=[made] * len(ids), scores=scores)  # type: ignore[list-item]


def test_sums_leave_out_what_was_given() -> None:
    reply = scored(-1.0, -3.0, -2.0)
    reply.made[0] = "given"
    told = sums_of(reply, 1)
    assert (told.n, told.perplexity, told.entropy, told.lowest) == (2, pytest.approx(math.exp(2.5)), 0.5, (1,))
    assert sums_of(Reply()).perplexity is None


def test_what_is_not_known_is_no_number() -> None:
    reply = scored(-1.0)
    reply.ids.append(7)
    reply.made.append("plain")
    n, k, buffers = arrays_of(reply, 0)
    assert (n, k) == (2, 1) and math.isnan(np.frombuffer(buffers[2], "<f4")[1])
    assert np.frombuffer(buffers[4], "<i4").tolist() == [1, 0]
    assert np.frombuffer(buffers[5], "<i4").tolist() == [0, -1]
    assert arrays_of(Reply(), 0) == (0, 0, [])


def test_white_space_and_levels_are_those_of_the_page() -> None:
    assert [visible(text) for text in (" a", "\n", "")] == ["␣a", "⏎", "∅"]
    assert [level_of(math.log(p)) for p in (1, 0.9, 0.89, 0.5, 0.1, 0.02, 0.01)] == [0, 0, 1, 2, 4, 5, 6]
    assert [probability(lp) for lp in (0.0, math.log(0.123), math.log(0.00012345), -900.0)] == [
        *("100 %", "12.3 %", "0.012 %", "0 %"),
    ]


def test_j11_the_saved_form_needs_nothing_and_holds_no_markup_of_the_model() -> None:
    nasty = {0: "<img src=x onerror=alert(1)>", 1: "\n", 2: "<script>", 3: "&"}
    reply = scored(-0.01, -0.5, -5.0, -1.0)
    saved = SavedLens(title="T", reply=reply, text=nasty.__getitem__)
    html = saved._repr_html_()
    assert "<img" not in html and "<script" not in html and "&lt;img" in html
    assert "onclick" not in html and "http" not in html and 'style="background:#ff8f94' in html
    assert "underline wavy" in html and "perplexity" in html and "&lt;script&gt;" in html
    text = str(saved)
    assert "perplexity" in text and "least likely tokens" in text and "<script>" in text
    assert set(saved.bundle()) == {"text/plain", "text/html"}


def test_a_saved_form_without_probabilities_tells_how_tokens_came_about() -> None:
    reply = Reply(label="q", ids=[0, 1], made=["first", "accepted"], note="n")
    html = SavedLens(title="T", reply=reply, text=str)._repr_html_()
    assert "accepted draft" in html and "perplexity" not in html and "<em>n</em>" in html
    long = SavedLens(title="T", reply=Reply(ids=[0] * (MOST + 1), made=["plain"] * (MOST + 1)), text=str)
    assert f"The first {MOST:,} of {MOST + 1:,} tokens are shown" in str(long)
    assert long._repr_html_().count('title="token') == MOST


def test_rounds_of_a_result_say_how_each_token_came_about(player: Model) -> None:
    result = player.chat(logprobs=1).send(ASKED)
    reply = reply_of_result(result)
    at = 1
    for one in result.rounds:
        made = reply.made[at : at + one.emitted]
        assert made == (["accepted"] * one.accepts + [one.kind])[: one.emitted]
        at += one.emitted
    assert at == len(result.ids) and reply.made[0] == "first"
