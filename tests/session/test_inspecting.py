"""Looking inside the bundled model, and changing what is in there."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from dsv4nb.engine.cpu import CpuEngine
from dsv4nb.engine.protocol import Engine
from dsv4nb.errors import ModelClosed, PromptEmpty, RequestError
from dsv4nb.events import Generation
from dsv4nb.model import Model, load
from dsv4nb.session import inspecting
from dsv4nb.session.inspection import Inspection

ASKED = "What is the capital of France?"


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load("toy", name="inside") as model:
        yield model


@pytest.fixture(scope="module")
def reply(model: Model) -> Generation:
    return model.generate(ASKED, temperature=0)


@pytest.fixture(scope="module")
def ids(model: Model) -> list[int]:
    """More than one chunk, four windows, and more entries than are picked."""
    return (model.tokenize("Remember that the code word is silver otter. ") + model.encode("It rained in Rome. ") * 60)[
        :300
    ]


@pytest.fixture(scope="module")
def whole(model: Model, ids: list[int]) -> Inspection:
    return model.inspect(ids, per_head=True, lens=True, keep=model.tap_names)


def blocks(model: Model) -> int:
    gc.collect()
    return model.engine.blocks_in_use


def test_the_logits_are_those_that_the_reply_was_chosen_from(model: Model, reply: Generation) -> None:
    seen = model.inspect(reply)
    assert seen.logits is not None and seen.ids == reply.all_ids
    n = len(reply.all_ids) - len(reply.ids)
    assert seen.logits[n - 1 : -1].argmax(-1).tolist() == list(reply.ids)
    assert reply.rounds, "the reply was speculated, and still these are its rows"

    def decoded(engine: Engine, _: object) -> list[Any]:
        state, rows = engine.new_state(), []
        for token in reply.all_ids:
            rows.append(engine.forward_rows(state, [token])[0])
            engine.commit(state, 1)
        engine.release(state)
        return rows

    rows = model._parts.server.do(decoded)
    assert (np.array(rows) == seen.logits).all()


def test_nothing_that_chats_go_on_from_is_touched(model: Model, ids: list[int]) -> None:
    chat = model.chat(temperature=0)
    chat.send(ASKED)
    before, held = model.cache.stats(), blocks(model)
    model.inspect(ids, keep="embed")
    with model.tap("layers.2.out", lambda x: 0 * x):
        model.inspect(ids)
        model.generate(ASKED, max_new=3)
    after = model.cache.stats()
    assert (after, blocks(model)) == (before, held)
    asked = chat.send("And of Italy?")
    assert asked.done.reuse is not None and asked.done.reuse.kind == "live"
    assert asked.text == Model.chat(model, temperature=0, messages=chat.messages[:2]).send("And of Italy?").text


def test_chosen_tokens_and_layers_are_rows_of_the_whole(model: Model, ids: list[int], whole: Inspection) -> None:
    wanted = [0, 63, 64, 200, 255, 256, 290]
    part = model.inspect(ids, tokens=wanted[::-1], layers=[4, 3], per_head=True, lens=True, keep="layers.1.middle")
    assert part.tokens.tolist() == wanted and part.layers == (3, 4)
    assert part.logits is not None and whole.logits is not None and part.lens is not None and whole.lens is not None
    assert (part.logits == whole.logits[wanted]).all()
    assert (part.lens == whole.lens[3:5, wanted]).all()
    assert (part.activations["layers.1.middle"] == whole.activations["layers.1.middle"][wanted]).all()
    assert (part.routing.experts == whole.routing.experts[3:5, wanted]).all()
    for layer in (3, 4):
        some, every = part.attention[layer], whole.attention[layer]
        s = some.entries.shape[1]
        assert (some.entries == every.entries[wanted][:, :s]).all()
        np.testing.assert_allclose(some.window, every.window[wanted], rtol=0, atol=1e-6)
        np.testing.assert_allclose(some.mass, every.mass[wanted][..., :s], rtol=0, atol=1e-6)


def test_the_lens_ends_in_the_logits_and_the_mean_is_that_of_the_heads(
    model: Model, ids: list[int], whole: Inspection
) -> None:
    assert whole.lens is not None and (whole.lens[-1] == whole.logits).all()
    mean = model.inspect(ids, tokens=[299])
    for layer in range(6):
        few, many = mean.reads(299, layer), whole.reads(-1, layer)
        assert few.heads is None and many.heads is not None and many.heads.shape == (4, len(few))
        np.testing.assert_allclose([r.mass for r in few], many.heads.mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("token", [0, 3, 4, 63, 64, 127, 128, 255, 299])
def test_reads_tell_where_each_thing_came_from(whole: Inspection, token: int) -> None:
    for layer, (kind, ratio) in enumerate([("swa", 0), ("swa", 0), ("csa", 4), ("hca", 128), ("csa", 4), ("hca", 128)]):
        reads = whole.reads(token, layer)
        assert reads.kind == kind
        rows, entries, (sink,) = (reads.of(what) for what in ("row", "entry", "sink"))
        assert [row.number for row in rows] == list(range(max(token - 63, 0), token + 1))
        assert all((row.first, row.last, row.score) == (row.number, row.number + 1, None) for row in rows)
        visible = (token + 1) // ratio if ratio else 0
        assert len(entries) == (min(visible, 32) if ratio == 4 else visible)
        for entry in entries:
            assert (entry.first, entry.last) == (ratio * entry.number, ratio * (entry.number + 1))
            assert entry.last <= token + 1
            assert entry.pools_from == max(entry.first - (4 if ratio == 4 else 0), 0)
            assert (entry.score is not None) == (ratio == 4)
        for item in (*rows, *entries):
            assert item.text == whole.text(item.first, item.last)
        assert sum(item.mass for item in reads) == pytest.approx(1, abs=1e-5) and sink.mass > 0
        assert "sink" in str(reads) and "<table>" in reads._repr_html_()


def test_counts_of_experts_are_those_of_the_tokens(whole: Inspection) -> None:
    """Section 2, idea 7: counts == K · layers · tokens."""
    routing = whole.routing
    counts = routing.counts()
    assert counts.shape == (6, 8) and counts.sum() == 2 * 6 * 300
    assert routing.hashed == (True, True, False, False, False, False)
    assert (routing.counts([5]) + routing.counts(range(0, 5)) == routing.counts(slice_of(0, 6))).all()
    for layer in range(6):
        for expert in range(8):
            assert counts[layer, expert] == (routing.experts[layer] == expert).any(-1).sum()
    np.testing.assert_allclose(routing.weights.sum(-1), 1.5, rtol=1e-6)
    np.testing.assert_allclose(routing.shares.sum(-1), 1, rtol=1e-6)
    for text in (str(whole), str(routing)):
        assert "token id" in text and "score" in text


def slice_of(first: int, last: int) -> list[int]:
    return list(range(first, last))


def test_putting_the_streams_of_one_run_into_another_makes_it_the_one(
    model: Model, ids: list[int], whole: Inspection
) -> None:
    other = [(token + 7) % 1000 + 40 for token in ids]
    with model.tap("layers.3.out", whole.activations["layers.3.out"]):
        patched = model.inspect(other)
    assert patched.logits is not None and whole.logits is not None
    assert (patched.logits == whole.logits).all() and patched.changed == ("layers.3.out",)
    plain = model.inspect(other)
    assert plain.logits is not None and (plain.logits != whole.logits).any() and plain.changed == ()

    at = [20, 270]
    with model.tap("layers.3.out", whole.activations["layers.3.out"][at], tokens=at):
        some = model.inspect(other, keep="layers.3.out")
    expected = model.inspect(other, keep="layers.3.out").activations["layers.3.out"].copy()
    expected[at] = whole.activations["layers.3.out"][at]
    assert (some.activations["layers.3.out"] == expected).all()


def test_taps_act_on_replies_that_are_started_in_the_block(model: Model, reply: Generation) -> None:
    seen: list[int] = []

    def watch(x: torch.Tensor) -> None:
        seen.append(len(x))

    with model.tap("layers.4.out", lambda x: x.clone()), model.tap("embed", watch):
        same = model.generate(ASKED, temperature=0)
        late = model.submit(ASKED, temperature=0)
    assert (same.ids, late.result().ids) == (reply.ids, reply.ids)
    assert same.done.route == "plain_greedy" and reply.done.route == "spec_greedy"
    n_prompt, n = same.done.n_prompt, len(same.all_ids) - same.done.n_prompt
    assert seen == 2 * [n_prompt, *([1] * n)]
    with model.tap("layers.4.out", lambda x: -x):
        assert model.generate(ASKED, temperature=0, max_new=8).ids != reply.ids
    assert model.generate(ASKED, temperature=0).ids == reply.ids
    assert len(seen) == 2 * (n + 1)


def test_taps_at_one_place_see_what_the_one_before_made(model: Model) -> None:
    seen: list[torch.Tensor] = []
    with model.tap("embed", lambda x: x + 1), model.tap("embed", lambda x: seen.append(x)):
        kept = model.inspect([5, 6, 7], keep="embed").activations["embed"]
    assert (seen[0].numpy() == kept).all()
    assert (kept == model.inspect([5, 6, 7], keep="embed").activations["embed"] + 1).all()


def test_it_runs_behind_the_queue(model: Model) -> None:
    ticket = model.submit("Tell me about Rome.", max_new=40)
    model.inspect([1, 2, 3])
    assert ticket.state == "done"


def test_an_interrupt_ends_it_within_a_chunk(model: Model) -> None:
    long = model.encode("It rained in Rome. ") * 400
    long, held = long[:3500], blocks(model)

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.15)
        with pytest.raises(KeyboardInterrupt):
            model.inspect(long, logits=False)
        left = time.monotonic()
    finally:
        signal.signal(signal.SIGALRM, before)
    model.inspect([1, 2, 3])  # behind it
    assert time.monotonic() - left < 1.5
    assert blocks(model) == held


LONG = 3900

REFUSED: dict[str, tuple[Callable[[Model], object], str, str]] = {
    "a text": (lambda m: m.inspect("hello"), "source", "m.tokenize"),  # type: ignore[arg-type]
    "a number": (lambda m: m.inspect(3), "source", "source is int"),  # type: ignore[arg-type]
    "no id": (lambda m: m.inspect([1, 2.5]), "source", "2.5"),  # type: ignore[list-item]
    "outside": (lambda m: m.inspect([1, 1280]), "source", "1280; ids are 0 to 1279"),
    "too long": (lambda m: m.inspect([1] * 4097), "source", "4097 ids; max_seq is 4096"),
    "a turn of no chat": (lambda m: m.inspect([1], turn=0), "turn", "leave it out"),
    "a turn of a reply": (lambda m: m.inspect(m.generate("Hi", max_new=1), turn=0), "turn", "leave it out"),
    "a chat without turns": (lambda m: m.inspect(m.chat()), "turn", "no turns"),
    "a layer": (lambda m: m.inspect([1], layers=[6]), "layers", "layers has 6; there are 6, 0 to 5"),
    "no layer": (lambda m: m.inspect([1], layers=[]), "layers", "none of 6"),
    "a token": (lambda m: m.inspect([1], tokens=[-2]), "tokens", "tokens has -2; there are 1"),
    "half a token": (lambda m: m.inspect([1], tokens=[0.5]), "tokens", "0.5; it must be an integer"),  # type: ignore[list-item]
    "a flag": (lambda m: m.inspect([1], lens=1), "lens", "True or False"),  # type: ignore[arg-type]
    "a place to keep": (lambda m: m.inspect([1], keep="layers.3.ou"), "keep", "Did you mean 'layers.3.out'"),
    "a place": (lambda m: m.tap("layers.3.attn.out", torch.neg), "place", "Did you mean 'layers.3.attention.out'"),
    "nowhere near": (lambda m: m.tap("q", torch.neg), "place", "A layer has attention.in"),
    "rows": (lambda m: m.tap("embed", np.zeros((3, 4, 256)), tokens=[1]), "change", "3 rows for 1 tokens"),
    "no rows": (lambda m: m.tap("embed", "x"), "change", "change is str"),
    "descending": (lambda m: m.tap("embed", torch.neg, tokens=[3, 1]), "tokens", "ascending"),
    "from the end": (lambda m: m.tap("embed", torch.neg, tokens=[-1]), "tokens", "count from 0"),
    "too much": (
        lambda m: m.inspect([1] * LONG, lens=True, per_head=True, keep=m.tap_names),
        "tokens",
        r"3,900 tokens in 6 layers take [\d,]+ MiB; at most 256 MiB .* Watch about 2,1[\d]+ tokens .* out keep, "
        "per_head, lens, or pass attention=False or logits=False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_argument_and_the_way_out(model: Model, name: str) -> None:
    call, param, said = REFUSED[name]
    with pytest.raises(RequestError, match=said) as caught:
        call(model)
    assert caught.value.param == param


def test_a_refusal_says_how_many_tokens_fit(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspecting, "LIMIT_MIB", 2)
    with pytest.raises(RequestError, match="Watch about") as caught:
        model.inspect([1] * 1000, lens=True)
    most = int(str(caught.value).split("about ")[1].split()[0].replace(",", ""))
    seen = model.inspect([1] * 1000, lens=True, tokens=range(most))
    assert 0.8 * 2**21 < seen.nbytes <= 2**21


def test_wrong_rows_are_refused_where_they_stand(model: Model) -> None:
    with model.tap("embed", np.zeros((2, 4, 8))), pytest.raises(RequestError, match=r"\[4, 8\]; a row there is"):
        model.inspect([1, 2])
    with model.tap("embed", lambda x: x[0]), pytest.raises(RequestError, match="the tap at embed returned"):
        model.generate(ASKED)


def test_chats_and_batches_are_refused_in_the_block(model: Model) -> None:
    chat = model.chat()
    with model.tap("embed", torch.neg):
        for call in (lambda: chat.send("Hi"), lambda: model.generate_batch(["Hi"])):
            with pytest.raises(RequestError, match="a tap is on at embed") as caught:
                call()
            assert caught.value.param == "tap"
    assert chat.send("Hi", max_new=2).ids


def test_reads_of_what_was_not_watched_are_refused(model: Model, ids: list[int]) -> None:
    seen = model.inspect(ids, tokens=[3, 4, 5, 9], layers=2)
    with pytest.raises(RequestError, match="token 7 was not watched; tokens 3-5, 9 were"):
        seen.reads(7, 2)
    with pytest.raises(RequestError, match="layer 3 was not watched; layers 2 were"):
        seen.reads(3, 3)


def test_empty_and_closed_and_scripted(make_model: Callable[..., Model]) -> None:
    with load("toy", name="closing") as model, pytest.raises(PromptEmpty):
        model.inspect([])
    with pytest.raises(ModelClosed):
        model.inspect([1])
    with pytest.raises(ModelClosed):
        model.tap("embed", torch.neg)
    fake = make_model()
    assert fake.tap_names == ()
    with pytest.raises(RequestError, match="no places to watch"):
        fake.inspect([1])


def test_closing_ends_an_inspection(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("toy", name="closed meanwhile")
    assert isinstance(model.engine, CpuEngine)
    caught: list[BaseException] = []
    started = threading.Event()

    def look() -> None:
        try:
            with model.tap("embed", lambda x: started.set()):
                model.inspect([5] * 3500, logits=False)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    started.wait(5)
    model.close()
    thread.join(5)
    assert isinstance(caught[0], ModelClosed)


def test_a_chat_is_looked_into_turn_by_turn(model: Model) -> None:
    chat = model.chat(temperature=0, thinking=True)
    replies = [chat.send(ASKED), chat.send("And of Italy?")]
    for turn, reply in enumerate(replies):
        assert model.inspect(chat, turn=turn, tokens=[-1]).ids == chat.ids(turn) == reply.all_ids
    assert model.inspect(chat, tokens=0).ids == replies[-1].all_ids


def test_routing_alone_takes_little(model: Model, ids: list[int], whole: Inspection) -> None:
    seen = model.inspect(ids, attention=False, logits=False)
    assert (seen.routing.experts == whole.routing.experts).all() and seen.nbytes < 2**17
    assert "token id" in str(seen)
    with pytest.raises(RequestError, match="leave out attention=False"):
        seen.reads(0, 0)


def test_reads_and_routing_are_frames(whole: Inspection, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pandas:
        """What is used of pandas."""

        @staticmethod
        def DataFrame(rows: list[dict[str, Any]], columns: list[str]) -> list[list[Any]]:
            return [columns, *([row[name] for name in columns] for row in rows)]

    monkeypatch.setitem(sys.modules, "pandas", Pandas)
    head, *rows = whole.reads(130, 2).to_frame()
    assert head[:3] == ["kind", "number", "first"] and len(rows) == 64 + 32 + 1
    assert rows[-1][0] == "sink" and sum(row[head.index("mass")] for row in rows) == pytest.approx(1, abs=1e-5)
    head, *rows = whole.routing.to_frame()
    assert len(rows) == 6 * 300 * 2
    layer, token, expert, weight, share = rows[2 * 300 * 3 + 2 * 7 + 1]
    assert (layer, token, expert) == (3, 7, whole.routing.experts[3, 7, 1])
    assert share == pytest.approx(weight / 1.5)
