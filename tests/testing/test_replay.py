"""A recording says what the model said, through the whole product, without the model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4nb.engine.protocol import Engine
from dsv4nb.errors import EngineError, RequestError
from dsv4nb.events import Generation, TokenLogprob
from dsv4nb.handle import Model
from dsv4nb.model import load
from dsv4nb.rounds import Rounds
from dsv4nb.testing.recorder import record
from dsv4nb.testing.recording import RecordedReply, Recording
from dsv4nb.testing.replay_engine import ReplayEngine
from dsv4nb.testing.replaying import replay_model
from dsv4nb.widgets.acceptance_saved import SavedRounds

PATH = Path(__file__).parents[1] / "data/recording.json"
RECORDING = Recording.open(PATH)
STORY, SUM, CAPITAL, AGAIN, CONTINUED = RECORDING.replies
# what a file keeps: six decimals of a log-probability, five of an entropy, six digits of the numbers of a round
ENTROPY, DIGITS = 2e-5, 1e-4
LOGPROB: dict[str, float] = {"abs": 1e-6, "rel": 2**-23}  # the row it is put into is of float32


@pytest.fixture
def player() -> Iterator[Model]:
    with replay_model(RECORDING, speed=math.inf) as model:
        yield model


@pytest.fixture(scope="module")
def toy() -> Iterator[Model]:
    with load("toy", name="recorded") as model:
        yield model


def asked(player: Model, reply: RecordedReply, **options: Any) -> Generation:
    """Ask by the very ids, and wait."""
    request = replace(player.prepare(prompt_ids=reply.prompt, **options), given=reply.given)
    return player.start(request).result()


def same_scores(found: tuple[TokenLogprob, ...], reply: RecordedReply) -> None:
    places = reply.places[:-1] if reply.ends else reply.places
    for one, place in zip(found[len(reply.given) :], places, strict=True):
        assert (one.id, one.rank) == (place.id, place.rank)
        assert one.logprob == pytest.approx(place.logprob, **LOGPROB)
        assert one.entropy == pytest.approx(place.entropy, abs=ENTROPY)
        assert [token for token, _ in one.top] == [token for token, _ in place.top]
        assert [lp for _, lp in one.top] == pytest.approx([lp for _, lp in place.top], **LOGPROB)


def without_times(rounds: Rounds) -> list[dict[str, Any]]:
    told = [{k: v for k, v in one.items() if k not in ("ms", "plain_ms")} for one in rounds.to_dicts()]
    return [{**one, "drafts": [_rounded(draft) for draft in one["drafts"]]} for one in told]


def _rounded(draft: dict[str, Any]) -> dict[str, Any]:
    return {k: pytest.approx(v, rel=DIGITS, abs=1e-9) if isinstance(v, float) else v for k, v in draft.items()}


@pytest.mark.parametrize("rate", [None, 60.0], ids=["at once", "60 rounds a second"])
def test_ids_texts_rounds_and_probabilities_are_the_recorded_ones(rate: float | None) -> None:
    with replay_model(PATH, speed=math.inf, rate=rate) as player:
        for reply in (STORY, SUM, CAPITAL):
            began = time.monotonic()
            said = asked(player, reply, logprobs=5)
            took = time.monotonic() - began
            assert said.ids == reply.ids
            assert said.raw_text == player.decode(reply.ids)
            assert without_times(said.rounds) == without_times(reply.rounds)
            assert said.config == reply.config and said.done.spec_config == reply.spec
            same_scores(said.logprobs, reply)
            if rate is not None:
                steps = len(reply.rounds) or len(reply.ids)
                assert took >= (steps - 2) / rate


@pytest.mark.parametrize("path", sorted(PATH.parent.glob("recording*.json")), ids=lambda path: path.stem)
def test_every_recording_is_played_as_it_was_said(path: Path) -> None:
    recording = Recording.open(path)
    assert len(recording.replies) == 5 and len(recording.arithmetic) > 0
    with replay_model(path, speed=math.inf) as player:
        for reply in recording.replies:
            said = asked(player, reply, logprobs=5)
            assert said.ids == reply.ids and without_times(said.rounds) == without_times(reply.rounds)
            if not reply.given:  # else those of what was given are left out
                same_scores(said.logprobs, reply)


def test_the_recorded_time_is_taken_and_another_speed_divides_it() -> None:
    recorded = sum(one.ms["draft"] + one.ms["verify"] for one in SUM.rounds) / 1e3
    with replay_model(RECORDING) as player:
        said = asked(player, SUM)
    assert said.done.timings.decode_s and said.done.timings.decode_s >= recorded
    for found, wanted in zip(said.rounds, SUM.rounds, strict=True):
        assert found.ms["verify"] >= wanted.ms["verify"] and found.ms["draft"] >= wanted.ms["draft"]
    with replay_model(RECORDING, speed=4) as player:
        said = asked(player, SUM)
    assert said.done.timings.decode_s and said.done.timings.decode_s >= recorded / 4


def test_a_recorded_chat_is_a_chat(player: Model) -> None:
    chat = player.chat(logprobs=5)
    seen: list[str] = []
    chat.on_submit(lambda text, ticket: seen.append(text))
    story = chat.send("Tell me a story about a dragon and a clock.")
    total = chat.send("What is 47 + 38?", thinking=True)
    capital = chat.send("What is the capital of France?", temperature=1.9, seed=3)
    assert [reply.ids for reply in (story, total, capital)] == [STORY.ids, SUM.ids, CAPITAL.ids]
    assert total.reasoning and "85" in total.text and "Paris" in capital.text
    assert capital.config == CAPITAL.config, "how it was made, not how it was asked for"
    assert story.rounds and not capital.rounds and capital.done.route == "plain_greedy"
    assert chat.messages[-1]["content"] == capital.text and len(seen) == 3
    assert total.done.n_cached > 0, "the caches of the product are real"
    chat.rewind(turn=2)
    assert chat.send("What is the capital of France?").ids == CAPITAL.ids


def test_replies_to_one_prompt_come_in_turn_and_an_alternative_goes_on(player: Model) -> None:
    chat = player.chat(logprobs=5)
    assert chat.send("Tell me a story about a dragon and a clock.").ids == STORY.ids
    again = chat.regenerate()
    assert again.ids == AGAIN.ids and len(chat.branches) == 2
    assert chat.regenerate().ids == AGAIN.ids, "the last one from then on"
    token = len(CONTINUED.given) - 1
    fork = chat.fork()
    continued = fork.continue_from(0, token, CONTINUED.given[token])
    assert continued.ids == CONTINUED.ids and continued.done.n_tokens == len(CONTINUED.places)
    same_scores(continued.logprobs, CONTINUED)
    assert fork.turns[0].text.startswith(player.decode(CONTINUED.given))


def test_scores_are_of_the_recording(player: Model) -> None:
    chat = player.chat()
    chat.send("Tell me a story about a dragon and a clock.")
    assert chat.turns[0].logprobs == ()
    same_scores(chat.score(0, 5), STORY)
    with pytest.raises(EngineError, match="does not go on behind"):
        player.score([9, 9, 9], STORY.ids[:2], 5)


def test_panels_show_it(player: Model) -> None:
    said = asked(player, STORY)
    shown = SavedRounds(title="s", label="", note="", rounds=tuple(said.rounds))
    recorded = SavedRounds(title="s", label="", note="", rounds=tuple(STORY.rounds))
    drawn = str(shown).split("\n\n")
    assert [one for one in drawn if "█" in one] == [one for one in str(recorded).split("\n\n") if "█" in one] != []


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("Tell me a story about a cat.", {}, "no turn beginning with 'Tell me a story about a cat.'"),
        ("x" * 99, {}, f"no turn beginning with '{'x' * 39}…'"),
        (
            "Tell me a story about a dragon and a clock.",
            {"system": "Be brief."},
            "with these options; it has 'Tell me a story",
        ),
        ("What is 47 \\+ 38", {}, "no turn beginning with"),
    ],
)
def test_what_was_not_recorded_is_refused_by_name(player: Model, text: str, options: Any, message: str) -> None:
    chat = player.chat(**options)
    with pytest.raises(RequestError, match=message):
        chat.send(text)
    assert chat.turns == [] and not chat.is_busy


def test_another_alternative_and_other_ids_are_refused(player: Model) -> None:
    chat = player.chat()
    chat.send("Tell me a story about a dragon and a clock.")
    with pytest.raises(RequestError, match="that goes on behind these 4 tokens"):
        chat.continue_from(0, 3, STORY.ids[0])
    with pytest.raises(RequestError, match="no turn beginning with these 3 ids"):
        player.generate(prompt_ids=[1, 2, 3])


def test_text_that_was_not_recorded_can_be_counted(player: Model) -> None:
    known = player.encode("a story about a fox")
    assert player.decode(known) == "a story about a fox"
    assert len(player.encode("жж")) == 4, "a token a byte where there is none"


def test_it_is_what_the_bundled_model_says(toy: Model) -> None:
    assert RECORDING.weights == toy.limits.weights, "run tests/testing/make_recording.py"
    for reply in (STORY, AGAIN):
        said = toy.generate(
            prompt_ids=reply.prompt,
            max_new=len(reply.ids),
            logprobs=5,
            temperature=reply.config.temperature,
            seed=reply.config.seed,
            min_p=reply.config.min_p,
        )
        assert said.ids == reply.ids
        same_scores(said.logprobs, reply)
        assert without_times(said.rounds) == without_times(reply.rounds)
    assert PATH.stat().st_size < 150_000


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.5, "min_p": 0.05, "spec_proposal": "greedy"},
        {"temperature": 1.0, "frequency_penalty": 0.5, "penalty_scope": "generated", "logit_bias": {5: -3.0}},
        {"temperature": 1.0, "sampler": "inverse_cdf", "spec": False},
        {"temperature": 1.0, "spec_window": ("slot", 0.6), "spec_depth": 4},
    ],
    ids=str,
)
def test_whatever_the_sampler_the_draws_are_the_recorded_ones(toy: Model, options: dict[str, Any]) -> None:
    chat = toy.chat(seed=11, **options)
    chat.send("Tell me a story about a fox.", max_new=50)
    with replay_model(record(chat), speed=math.inf) as player:
        other = player.chat()
        said = other.send("Tell me a story about a fox.")
        turn = chat.turns[0]
        assert (said.ids, said.text, said.stop_reason) == (turn.ids, turn.text, turn.stop_reason)
        assert without_times(said.rounds) == without_times(turn.rounds)


def test_a_file_is_the_recording(tmp_path: Path, toy: Model) -> None:
    chat = toy.chat(temperature=1, seed=2, stop="the")
    chat.send("Tell me a story about a fox.", max_new=30)
    recording = record(chat, tmp_path / "r.json", model=toy)
    assert chat.turns[0].stop_reason == "stop"
    opened = Recording.open(tmp_path / "r.json")
    assert opened.replies[0].ids == chat.turns[0].ids
    assert opened.save(tmp_path / "again.json") == (tmp_path / "r.json").stat().st_size
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "r.json").read_bytes()
    assert recording.texts == opened.texts


def test_what_cannot_be_recorded_is_refused(toy: Model, tmp_path: Path) -> None:
    rejected = toy.generate("hi", max_new=8, spec_mode="rejection", temperature=1)
    auto = toy.generate("hi", max_new=8, spec_window="auto")
    history = toy.chat(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    for source, message in (
        (rejected, "spec_mode='rejection'"),
        (auto, "spec_window='auto'"),
        (history, "turn 0 cannot be recorded: it came as text"),
        (["a"], "source holds a str"),
        ([], "there is no reply to record"),
    ):
        with pytest.raises(RequestError, match=message):
            record(source, tmp_path / "r.json", model=toy)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="pass model="):
        record(toy.generate("hi", max_new=2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "does not say that it is a 'dsv4nb recording'"),
        ({"version": 2}, "its version is 2; this dsv4nb reads 1"),
        ({"replies": [{}]}, "cannot be played"),
        ({"more": 1}, "cannot be played"),
    ],
    ids=str,
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "r.json").write_text(json.dumps(json.loads(PATH.read_text()) | change))
    with pytest.raises(RequestError, match=message):
        replay_model(tmp_path / "r.json")
    with pytest.raises(RequestError, match="cannot be read"):
        replay_model(tmp_path / "missing.json")


@pytest.mark.parametrize("options", [{"speed": 0}, {"rate": -1}, {"speed": True}, {"rate": "fast"}], ids=str)
def test_a_speed_must_be_one(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="must be a number above 0"):
        replay_model(RECORDING, **options)


def test_it_is_an_engine_whose_sequences_can_be_captured_and_saved(player: Model, tmp_path: Path) -> None:
    engine: Engine = ReplayEngine(RECORDING, speed=math.inf)
    state = engine.new_state()
    row = engine.prefill(state, STORY.prompt).logits
    ahead = engine.restore(engine.capture(state))
    assert (engine.forward_rows(ahead, STORY.ids[:1]) == engine.forward_rows(state, STORY.ids[:1])).all()
    assert int(row.argmax()) == STORY.places[0].top[0][0]
    chat = player.chat()
    chat.send("Tell me a story about a dragon and a clock.")
    chat.save(tmp_path / "chat")
    assert player.open_chat(tmp_path / "chat").send("What is 47 + 38?", thinking=True).ids == SUM.ids


def test_it_needs_no_torch_and_no_tokenizer() -> None:
    code = (
        "import sys, math\n"
        "for name in ('torch', 'tokenizers', 'triton', 'safetensors', 'llguidance'): sys.modules[name] = None\n"
        "from dsv4nb.testing import replay_model\n"
        f"chat = replay_model({str(PATH)!r}, speed=math.inf).chat()\n"
        "print(chat.send('Tell me a story about a dragon and a clock.').stop_reason)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "length", done.stderr
