"""`chat.options` and `chat.set`: what the next turns ask for, checked before anything changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dsv4nb.errors import Dsv4Error, EncodingError, RequestError
from dsv4nb.model import Model
from dsv4nb.session.chat import Chat
from dsv4nb.session.request import Options
from dsv4nb.testing.fake_model import fake_model


@pytest.fixture
def model() -> Iterator[Model]:
    with fake_model(["One.", "Two.", "Three."], drafts=lambda before: [1] * 5) as made:
        yield made


def weather(city: str) -> str:
    """Tell the weather."""
    return city


def test_j16_what_is_set_holds_for_the_next_turn(model: Model) -> None:
    chat = model.chat(temperature=0.5)
    assert chat.options == Options(temperature=0.5)
    chat.set(temperature=0.25, top_k=7, seed=3, max_new=1, spec_window=("slot", 0.6))
    done = chat.send("hi").done
    assert (done.config.temperature, done.config.top_k, done.config.seed, done.n_tokens) == (0.25, 7, 3, 1)
    chat.set(temperature=None, max_new=None)
    assert chat.options == Options(top_k=7, seed=3, spec_window=("slot", 0.6))
    assert chat.send("again").config.temperature == model.limits.sampler.temperature
    assert chat.send("once", temperature=0.75).config.temperature == 0.75
    assert chat.options.temperature is None, "an option of one turn is of that turn"


def test_thinking_is_one_of_the_options_and_the_other_way_round(model: Model) -> None:
    chat = model.chat(effort="high")
    assert chat.thinking is False and chat.options.thinking is False
    chat.set(thinking=True)
    assert chat.thinking is True
    chat.thinking = False
    assert chat.options.thinking is False and chat.options.effort == "high", "it waits for thinking turns"


@pytest.mark.parametrize(
    ("asked", "error", "param"),
    [
        ({"temperature": 0.1, "top_p": 7}, RequestError, "top_p"),
        ({"temprature": 1}, RequestError, "temprature"),
        ({"sampler": "inverse_cdf", "spec_mode": "rejection"}, RequestError, "spec_mode"),
        ({"spec_depth": 9}, RequestError, "spec_depth"),
        ({"spec": False, "spec_depth": 2}, RequestError, "spec_depth"),
        ({"stop": [""]}, RequestError, "stop"),
        ({"stop_token_ids": [-1]}, RequestError, "stop_token_ids"),
        ({"logit_bias": {4096: 1.0}}, RequestError, "logit_bias"),
        ({"logprobs": 99}, RequestError, "logprobs"),
        ({"max_new": -1}, RequestError, "max_new"),
        ({"max_prompt_tokens": 0}, RequestError, "max_prompt_tokens"),
        ({"thinking": "yes"}, RequestError, "thinking"),
        ({"trust_text": 1}, RequestError, "trust_text"),
        ({"effort": "huge"}, EncodingError, "messages"),
        ({"system": 5}, RequestError, "system"),
        ({"tools": [5]}, Dsv4Error, "tools"),
    ],
)
def test_what_is_refused_changes_nothing(
    model: Model, asked: dict[str, Any], error: type[Dsv4Error], param: str
) -> None:
    chat = model.chat(temperature=0.5)
    heard: list[Options] = []
    chat.on_set(lambda: heard.append(chat.options))
    for call in (chat.check, chat.set):
        with pytest.raises(error) as refused:
            call(**asked)
        assert refused.value.param == param
    assert chat.options == Options(temperature=0.5) and heard == []


def test_a_check_tells_what_would_be_and_changes_nothing(model: Model) -> None:
    chat = model.chat(temperature=0.5)
    assert chat.check(top_k=4) == Options(temperature=0.5, top_k=4)
    assert chat.options == Options(temperature=0.5)


def test_listeners_hear_of_a_change_once_and_after_it(model: Model) -> None:
    chat = model.chat()
    heard: list[Any] = []
    end = chat.on_set(lambda: heard.append((chat.options.temperature, chat.thinking)))
    chat.set(temperature=0.5, thinking=True)
    chat.thinking = True
    assert heard == [(0.5, True)], "what is set to what it is changes nothing"
    chat.thinking = False
    end()
    chat.set(top_k=3)
    assert heard == [(0.5, True), (0.5, False)]


def test_j16_a_running_turn_keeps_what_it_began_with() -> None:
    with fake_model(" ".join(f"w{i}" for i in range(2000)), delay_s=0.005) as slow:
        chat = slow.chat(temperature=0.5)
        ticket = chat.submit("hi")
        while ticket.state == "queued":
            time.sleep(0.002)
        chat.set(temperature=0.9, system="Be brief.")
        ticket.cancel()
        assert ticket.result().config.temperature == 0.5
        assert chat.send("again", max_new=1).config.temperature == 0.9
        assert chat.messages[0] == {"role": "system", "content": "Be brief."}


def test_tools_can_be_set(model: Model) -> None:
    chat = model.chat()
    chat.set(tools=[weather])
    assert "weather" in model.render("hi", tools=chat.options.tools)


def test_forks_keep_options_and_limits_and_go_their_own_ways(model: Model) -> None:
    chat = model.chat()
    chat.set(temperature=0.5, thinking=True)
    other = chat.fork()
    assert other.options == chat.options and other.limits is chat.limits is not None
    other.set(temperature=0.9)
    assert chat.options.temperature == 0.5
    with pytest.raises(RequestError):
        other.set(top_p=7)


def test_a_saved_chat_keeps_what_was_set(model: Model, tmp_path: Any) -> None:
    chat = model.chat()
    chat.set(temperature=0.25, seed=2**63, stop=["x"], spec_window=("slot", 0.6))
    chat.save(tmp_path / "chat")
    again = model.open_chat(tmp_path / "chat")
    kept = ("temperature", "seed")
    assert [getattr(again.options, name) for name in kept] == [getattr(chat.options, name) for name in kept]
    with pytest.raises(RequestError):
        again.set(top_p=7)


def test_changes_from_many_threads_lose_nothing(model: Model) -> None:
    chat = model.chat()
    names = ["temperature", "top_k", "max_new", "seed", "penalty_last_n"]
    threads = [
        threading.Thread(target=lambda name=name: [chat.set(**{name: i}) for i in range(1, 101)]) for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [getattr(chat.options, name) for name in names] == [100] * 5


def test_a_chat_without_a_model_checks_names_alone() -> None:
    chat = Chat(lambda *_, **__: None)  # type: ignore[arg-type,return-value]
    chat.set(top_p=7)
    with pytest.raises(RequestError, match=r"chat\.set\(\) has no keyword 'topp'"):
        chat.set(topp=7)
