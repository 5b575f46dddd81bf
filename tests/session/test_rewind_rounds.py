"""Going back to a round of the last reply: as if it had been stopped there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4nb.errors import EngineError, RequestError
from dsv4nb.model import Model, load
from dsv4nb.testing.fake_engine import FakeTokenizer

MakeModel = Callable[..., Model]


@pytest.fixture(scope="module")
def toy() -> Iterator[Model]:
    with load("toy", name="rewind") as model:
        yield model


def speaking(make_model: MakeModel, reply: str, thinking: bool = False) -> Any:
    """A chat whose drafts are right but for every third one."""
    tokens = FakeTokenizer()
    script = tokens.encode_trusted(reply)

    def drafts(before: tuple[int, ...]) -> list[int]:
        if before[-1] not in script:
            return [1] * 5
        at = script.index(before[-1]) + 1
        return [token if (at + i) % 3 else token + 1 for i, token in enumerate(script[at : at + 5])]

    model = make_model([script, tokens.encode_plain("Then this.")], tokenizer=tokens, drafts=drafts)
    return model.chat(temperature=0, thinking=thinking)


def test_the_reply_ends_where_the_round_began(make_model: MakeModel) -> None:
    chat = speaking(make_model, " ".join(f"w{i}" for i in range(12)))
    whole = chat.send("hi")
    assert len(whole.rounds) == 4
    for number, one in enumerate(whole.rounds):
        chat.switch(1)
        chat.rewind(round=number)
        (turn,) = chat.turns
        n = 1 + sum(before.emitted for before in whole.rounds[:number])
        assert turn.text.split() == [f"w{i}" for i in range(n)] and turn.n_tokens == n
        assert turn.stop_reason == "cancelled" and turn.rounds == whole.rounds[:number]
        assert chat.messages[-1] == {"role": "assistant", "content": turn.text}
        assert one.start == whole.done.n_prompt + n - 1
    assert len(chat.branches) == 5 and chat.send("go on").text == "Then this."
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "user", "assistant"]


def test_reasoning_is_cut_in_its_own_channel(make_model: MakeModel) -> None:
    chat = speaking(make_model, "a1 a2 a3 a4 a5 a6</think>b1 b2 b3 b4 b5", thinking=True)
    whole = chat.send("hi")
    seen = set()
    for number in range(len(whole.rounds)):
        chat.switch(1)
        chat.rewind(round=number)
        turn = chat.turns[-1]
        assert whole.reasoning.startswith(turn.reasoning) and whole.text.startswith(turn.text)
        assert not turn.text or turn.reasoning == whole.reasoning
        assert chat.messages[-1].get("reasoning_content", "") == turn.reasoning
        seen.add((bool(turn.reasoning), bool(turn.text)))
    assert seen == {(True, False), (True, True)}


def test_a_round_that_is_not_there_is_refused_and_nothing_changes(make_model: MakeModel) -> None:
    chat = speaking(make_model, "w0 w1 w2 w3 w4")
    with pytest.raises(RequestError, match="there is no turn"):
        chat.rewind(round=0)
    with pytest.raises(RequestError, match="pass turn=, round= or both"):
        chat.rewind()
    chat.send("hi")
    n = len(chat.turns[0].rounds)
    for bad in (n, -1, True, "1"):
        with pytest.raises(RequestError, match=f"the turn has rounds 0 to {n - 1}") as raised:
            chat.rewind(round=bad)
        assert raised.value.param == "round"
    chat.send("more", spec=False)
    with pytest.raises(RequestError, match="no rounds: it was not speculated"):
        chat.rewind(round=0)
    assert len(chat.branches.nodes) == 2
    chat.rewind(1, round=1)
    assert len(chat.turns) == 1 and chat.turns[0].stop_reason == "cancelled"


def test_a_turn_that_failed_is_refused(make_model: MakeModel) -> None:
    tokens = FakeTokenizer()
    script = tokens.encode_plain("w0 w1 w2 w3 w4 w5 w6 w7 w8 w9")
    model = make_model([script], tokenizer=tokens, drafts=lambda before: [1] * 5, faults={2: RuntimeError("broke")})
    chat = model.chat(temperature=0)
    with pytest.raises(EngineError):
        chat.send("hi")
    assert chat.turns[-1].rounds
    with pytest.raises(RequestError, match="this turn failed"):
        chat.rewind(round=0)
    assert len(chat.turns) == 1 and chat.messages == []


def test_a_turn_with_calls_goes_back_as_a_whole(toy: Model) -> None:
    def get_time(city: str) -> str:
        """Get the local time in a city.

        Args:
            city: Name of the city
        """
        return "16:45"

    chat = toy.chat(tools=[get_time], temperature=0)
    chat.send("What time is it in Oslo?")
    assert chat.turns[-1].calls and chat.turns[-1].rounds
    with pytest.raises(RequestError, match="made calls"):
        chat.rewind(round=0)


def test_what_is_said_next_is_what_the_same_history_gives_cold(toy: Model, tmp_path: Path) -> None:
    chat = toy.chat(temperature=0, max_new=40)
    chat.send("Tell me a story about a fox.")
    chat.rewind(round=2)
    chat.save(tmp_path / "chat.dsv4")
    opened = toy.open_chat(tmp_path / "chat.dsv4")
    assert opened.turns == chat.turns and [n.turn for n in opened.branches.nodes] == [
        n.turn for n in chat.branches.nodes
    ]
    said = chat.send("What is 63 - 27?")
    assert said.done.n_cached > 0 and toy.replay(said.recipe).ids == said.ids
    other = toy.chat(messages=opened.to_messages(), temperature=0, max_new=40)
    assert other.send("What is 63 - 27?").ids == said.ids == opened.send("What is 63 - 27?").ids
