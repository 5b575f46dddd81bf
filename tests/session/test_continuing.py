"""Going on from the middle of a reply: what is given stays, what follows is what a plain run of the same ids says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4nb.errors import ChatBusy, EngineError, RequestError
from dsv4nb.events import Generation, PromptUsage, Recipe, Token
from dsv4nb.model import Model, load
from dsv4nb.session.chat import Chat
from dsv4nb.widgets.acceptance_story import Reader as Story
from dsv4nb.widgets.acceptance_story import story_of_turn
from dsv4nb.widgets.lens_reply import Reader as Tokens
from dsv4nb.widgets.lens_reply import reply_of_turn

MakeModel = Callable[..., Model]
STORY = "Tell me a story about a fox."


@pytest.fixture(scope="module")
def toy() -> Iterator[Model]:
    with load("toy", name="continuing") as model:
        yield model


def asked(toy: Model, *, max_new: int = 24, **options: Any) -> tuple[Chat, Generation]:
    chat = toy.chat(**{"temperature": 0.9, "seed": 5, **options})
    return chat, chat.send(STORY, max_new=max_new)


def other(whole: Generation, token: int) -> int:
    """An alternative that was not chosen."""
    return next(one for one, _ in whole.logprobs[token].top if one != whole.ids[token])


@pytest.mark.parametrize("options", [{}, {"spec": False}, {"temperature": 0}, {"repetition_penalty": 1.3}], ids=str)
def test_the_rest_is_what_a_plain_run_of_the_same_ids_says(toy: Model, options: dict[str, Any]) -> None:
    options = {"temperature": 0.9, "seed": 5, **options}
    chat, whole = asked(toy, logprobs=3, **options)
    for token in (0, 1, 9):
        fork, alternative = chat.fork(), other(whole, token)
        reply = fork.continue_from(0, token, alternative)
        begun = (*whole.ids[:token], alternative)
        plain = toy.generate(prompt_ids=(*whole.recipe.prompt, *begun), logprobs=3, max_new=24, **options)
        assert reply.ids == (*begun, *plain.ids)
        assert reply.logprobs[token + 1 :] == plain.logprobs and reply.logprobs[:token] == whole.logprobs[:token]
        assert reply.done.n_tokens == len(plain.ids) and reply.done.n_prompt == plain.done.n_prompt
        assert reply.rounds.usage == plain.rounds.usage
        assert len(fork.branches) == 2 and len(chat.branches) == 1


def test_the_alternative_is_told_as_the_model_would_have_told_it(toy: Model) -> None:
    chat, whole = asked(toy, logprobs=5)
    token = 6
    told = chat.fork().continue_from(0, token, other(whole, token)).logprobs[token]
    met = whole.logprobs[token]
    assert told == toy.score((*whole.recipe.prompt, *whole.ids[:token]), [told.id])[0]
    assert (told.entropy, told.top) == (met.entropy, met.top) and told.rank == 2


def test_only_what_is_new_is_computed_once_a_place_was_continued(toy: Model) -> None:
    chat, whole = asked(toy, logprobs=3)
    first, second = (one for one, _ in whole.logprobs[5].top if one != whole.ids[5])
    reuse = chat.fork().continue_from(0, 5, first).done.reuse
    assert reuse and reuse.kind == "anchor" and reuse.computed <= 8 + 5 + 1, "behind the prompt's own anchor"
    reuse = chat.fork().continue_from(0, 5, second).done.reuse
    assert reuse and (reuse.kind, reuse.computed) == ("anchor", 1)


def test_the_history_holds_the_beginning_and_what_was_made_of_it(toy: Model) -> None:
    chat, whole = asked(toy, logprobs=3)
    fork = chat.fork()
    reply = fork.continue_from(-1, 4, other(whole, 4))
    (turn,) = fork.turns
    assert turn.text == reply.text == toy.decode(reply.ids) and turn.text.startswith(toy.decode(whole.ids[:4]))
    assert fork.messages == [{"role": "user", "content": STORY}, {"role": "assistant", "content": reply.text}]
    assert (turn.ids, turn.n_given, turn.n_tokens) == (reply.ids, 5, len(reply.ids) - 5)
    assert turn.logprobs == reply.logprobs and len(turn.logprobs) == len(turn.ids)
    assert chat.turns[0].ids == whole.ids, "the chat that was forked is as it was"
    assert fork.send("Go on.", max_new=4).stop_reason in ("stop", "length")


def test_events_tell_the_given_tokens_first(toy: Model) -> None:
    chat, whole = asked(toy)
    ticket = chat.submit_from(0, 7)
    reply = ticket.result()
    usage, *rest = ticket.poll(0)[0]
    assert isinstance(usage, PromptUsage) and usage.n_given == 7
    ids = [event.id for event in rest if isinstance(event, Token) and event.id is not None]
    assert tuple(ids) == reply.ids and reply.ids[:7] == whole.ids[:7]
    assert reply.ids[: len(whole.ids)] == whole.ids, "the same seed chooses the same again"


def test_a_round_of_a_continued_reply_can_be_gone_back_to(toy: Model) -> None:
    chat, whole = asked(toy, logprobs=3, max_new=40)
    reply = chat.continue_from(0, 3, other(whole, 3))
    assert reply.rounds[0].start == reply.done.n_prompt
    chat.rewind(round=1)
    (turn,) = chat.turns
    n = 4 + 1 + reply.rounds[0].emitted
    assert turn.ids == reply.ids[:n] and turn.text == toy.decode(reply.ids[:n]) and len(turn.logprobs) == n
    assert chat.continue_from(0, n - 1, turn.ids[-1]).ids[:n] == turn.ids


def test_what_panels_read_of_the_run_is_what_the_turn_remembers(toy: Model) -> None:
    chat, whole = asked(toy, logprobs=3, max_new=40)
    ticket = chat.submit_from(0, 3, other(whole, 3))
    reply = ticket.result()
    (turn,) = chat.turns
    for live, kept in ((Story(ticket), story_of_turn(turn)), (Tokens(ticket), reply_of_turn(turn))):
        live.read()
        told = live.shown
        assert told.before == kept.before if isinstance(live, Story) else told.made == kept.made
    assert story_of_turn(turn).before[0] == ("", toy.decode(reply.ids[:5])), "four were given, the fifth is the first"
    assert reply_of_turn(turn).made[:5] == ["given"] * 4 + ["first"]


def test_thoughts_go_on_as_thoughts_and_what_follows_them_as_content(make_model: MakeModel) -> None:
    model = make_model(["a1 a2 a3</think> b1 b2 b3", " x1</think> y1", " y2 y3"])
    chat = model.chat(temperature=0, thinking=True)
    whole = chat.send("hi")
    assert (whole.reasoning, whole.text) == ("a1 a2 a3", " b1 b2 b3")
    within = chat.continue_from(0, 1, model.encode(" z1")[0])
    assert (within.reasoning, within.text) == ("a1 z1 x1", " y1")
    chat.switch(1)
    behind = chat.continue_from(0, 5, model.encode(" z2")[0])
    assert (behind.reasoning, behind.text) == ("a1 a2 a3", " b1 z2 y2 y3")
    assert chat.messages[-1] == {"role": "assistant", "content": " b1 z2 y2 y3", "reasoning_content": "a1 a2 a3"}


def test_a_character_that_is_cut_in_two_is_whole_again(make_model: MakeModel) -> None:
    model = make_model()
    tokens = model._parts.tokens
    smile = tokens.encode_bytes("😀")  # type: ignore[attr-defined]
    model = make_model([smile, smile[2:]], tokenizer=tokens)
    chat = model.chat(temperature=0)
    assert chat.send("hi").text == "😀"
    assert chat.continue_from(0, 2).text == "😀"


def test_an_alternative_can_end_the_reply(toy: Model) -> None:
    chat, whole = asked(toy)
    ended = chat.continue_from(0, 5, toy.eos)
    assert (ended.ids, ended.stop_reason, ended.done.n_tokens) == (whole.ids[:5], "stop", 0)
    assert chat.messages[-1]["content"] == toy.decode(whole.ids[:5])


def test_a_stop_string_ends_it_where_the_alternative_completes_it(make_model: MakeModel) -> None:
    model = make_model(["one two three", " never"])
    chat = model.chat(temperature=0, stop="two STOP")
    assert chat.send("hi").text == "one two three"
    ended = chat.continue_from(0, 2, model.encode(" STOP")[0])
    assert (ended.text, ended.stop_reason, ended.done.n_tokens) == ("one ", "stop", 0)


def test_behind_the_last_token_a_reply_that_was_cut_goes_on(toy: Model) -> None:
    chat, whole = asked(toy, max_new=12)
    longer = asked(toy, max_new=30)[1]
    assert chat.continue_from(0, 12, max_new=18).ids == longer.ids
    assert whole.stop_reason == "length"


def test_max_new_counts_what_is_new(toy: Model) -> None:
    chat, _ = asked(toy)
    reply = chat.continue_from(0, 10, max_new=3)
    assert (len(reply.ids), reply.done.n_tokens, reply.stop_reason) == (13, 3, "length")


def test_a_continued_reply_is_replayed_from_its_recipe(toy: Model) -> None:
    options = {"penalty_scope": "generated", "frequency_penalty": 0.7, "logprobs": 3}
    chat, whole = asked(toy, **options)
    reply = chat.continue_from(0, 8, other(whole, 8))
    recipe = Recipe.from_json(reply.recipe.to_json())
    assert recipe.given == reply.ids[:9] and toy.replay(recipe).ids == reply.ids
    older = reply.recipe.to_json().replace(', "given": ' + str(list(recipe.given)), "")
    assert "given" not in older and Recipe.from_json(older).given == ()


def test_log_probabilities_that_nobody_knows_are_scored_first(toy: Model) -> None:
    chat, _ = asked(toy)
    scores = chat.score(0, 4)
    known = chat.fork().continue_from(0, 6, scores[6].top[1][0], scores=scores, logprobs=4)
    found = chat.fork().continue_from(0, 6, scores[6].top[1][0], logprobs=4)
    assert known.logprobs == found.logprobs and len(known.logprobs) == len(known.ids)
    assert chat.fork().continue_from(0, 6, scores[6].top[1][0]).logprobs == ()


def test_a_turn_of_the_past_goes_on_behind_the_prompt_that_it_had(toy: Model) -> None:
    chat, _ = asked(toy)
    second = chat.send("What is 47 + 38?", max_new=12, temperature=0)
    chat.send("Thanks.", max_new=4)
    assert chat.continue_from(1, 0).ids == second.ids, "asked as it was asked"
    assert [turn.user for turn in chat.turns] == [STORY, "What is 47 + 38?"]


def test_it_survives_a_file(toy: Model, tmp_path: Path) -> None:
    chat, whole = asked(toy, logprobs=3)
    alternative = other(whole, 6)
    expected = chat.fork().continue_from(0, 6, alternative)
    chat.save(tmp_path / "chat")
    opened = toy.open_chat(tmp_path / "chat")
    assert opened.turns[0].ids == whole.ids and opened.turns[0].logprobs == whole.logprobs
    reply = opened.continue_from(0, 6, alternative)
    assert (reply.ids, reply.logprobs) == (expected.ids, expected.logprobs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 99), "token is 99; the reply has tokens 0 to 2, and 3 is its end"),
        ((0, True), "token is True"),
        ((0, -1), "token is -1"),
        ((0, 1, -5), "alternative is -5; it must be a token id"),
        ((0, 1, 99_999), "alternative is 99999; ids are 0 to 4095"),
        ((7, 1), "turn is 7; this branch has turns 0 to 0"),
    ],
    ids=str,
)
def test_bad_arguments_are_named_and_nothing_is_changed(
    make_model: MakeModel, arguments: tuple[int, ...], message: str
) -> None:
    chat = make_model("one two three").chat()
    chat.send("hi")
    with pytest.raises(RequestError, match=message):
        chat.continue_from(*arguments)
    assert len(chat.branches.nodes) == 1 and not chat.is_busy


@pytest.mark.parametrize("name", ["thinking", "system", "tools", "response_format", "regex"])
def test_what_would_change_the_prompt_is_refused(make_model: MakeModel, name: str) -> None:
    chat = make_model("one two three").chat()
    chat.send("hi")
    with pytest.raises(RequestError, match=f"{name} cannot be changed in the middle of a reply") as refused:
        chat.continue_from(0, 1, **{name: "x"})
    assert refused.value.param == name


def test_turns_without_ids_without_success_and_with_calls_are_refused(make_model: MakeModel) -> None:
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    chat = make_model("one two", faults={0: ValueError("broken")}).chat(messages=history)
    with pytest.raises(RequestError, match="not known: it came as text"):
        chat.continue_from(0, 0)
    with pytest.raises(RequestError, match="not known: it came as text"):
        chat.score(0)
    with pytest.raises(EngineError):
        chat.send("hi")
    with pytest.raises(RequestError, match="this turn failed"):
        chat.continue_from(1, 0)
    calls = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'

    def f() -> str:
        """Do it."""
        return "done"

    chat = make_model([calls, "Done."]).chat(tools=[f], temperature=0)
    assert chat.send("hi").text == "Done." and chat.turns[0].calls
    with pytest.raises(RequestError, match="this turn made calls"):
        chat.continue_from(0, 0)


def test_a_constrained_reply_is_not_continued(toy: Model) -> None:
    pytest.importorskip("llguidance")
    chat = toy.chat(temperature=0)
    chat.send("What is 2 + 2?", regex="[0-9]+", max_new=5)
    with pytest.raises(RequestError, match="cannot be constrained"):
        chat.continue_from(0, 0)
    assert not chat.is_busy


def test_a_busy_chat_refuses(make_model: MakeModel) -> None:
    chat = make_model(["one two", " ".join(["x"] * 400)], delay_s=0.01).chat()
    chat.send("hi")
    ticket = chat.submit("again")
    with pytest.raises(ChatBusy):
        chat.continue_from(0, 1)
    ticket.cancel()
    ticket.result()


def test_cancelled_while_it_reads_nothing_is_kept_of_it(make_model: MakeModel) -> None:
    model = make_model(["one two three", " four"], chunk=1, chunk_delay_s=0.02)
    chat = model.chat(temperature=0)
    chat.send("hi")
    known = model.cache.stats().anchors
    ticket = chat.submit_from(0, 2)
    ticket.cancel()
    reply = ticket.result()
    assert reply.stop_reason == "cancelled" and reply.done.n_tokens == 0
    assert model.cache.stats().anchors == known
