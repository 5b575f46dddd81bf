"""Promises of speculation across the layers (M-08, M-22 … M-33, M-59); `speculation.py` runs thousands of replies."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dsv4nb.config import SpecConfig
from dsv4nb.errors import CheckpointError, RequestError
from dsv4nb.events import Round, SpecUsage
from dsv4nb.model import Model, load
from dsv4nb.testing.fake_engine import FakeTokenizer
from dsv4nb.testing.scripted_drafter import ScriptedDrafter, drafted_model
from dsv4nb.testing.tiny_checkpoint import write_tiny_checkpoint
from dsv4nb.testing.tiny_tokenizer import write_tiny_tokenizer

MakeModel = Callable[..., Model]
SCRIPT = Path(__file__).with_name("speculation.py")
PROMPTS = ("What is the capital of France?", "Tell me a story about a fox.", "Why is the sky blue?")
GUESS = "What is the code word?"  # nothing tells, so seeds differ
PENALISED = {"penalty_last_n": 256, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.2}
SMALL = {"vocab_size": 512, "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 0, 0, 0, 0]}


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("speculation", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def plain() -> Iterator[Model]:
    with load("toy", name="plain", drafter=False) as model:
        yield model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spec") / "tiny"
    return write_tiny_tokenizer(
        write_tiny_checkpoint(folder, drafter="dspark", dspark_target_layer_ids=[1, 2, 3], **SMALL)
    )


def words(n: int, tokens: FakeTokenizer) -> list[int]:
    return tokens.encode_plain(" ".join(f"w{i}" for i in range(n)))


def follows(script: list[int], wrong: int | None = None) -> Callable[[tuple[int, ...]], list[int]]:
    """Drafts of what comes next in `script`, wrong in one slot."""

    def drafts(before: tuple[int, ...]) -> list[int]:
        if before[-1] not in script:  # asked by whoever measures
            return [1] * 5
        at = script.index(before[-1]) + 1
        right = [*script[at : at + 5], *[1] * 5][:5]
        return [token + 3 if slot == wrong else token for slot, token in enumerate(right)]

    return drafts


def test_a_sample_of_thousands_differs_nowhere(script: Any) -> None:
    counts = script.run(10, seed=11, names=("its own", "wrong at 3"))
    assert counts["drafts accepted"] > 5 and counts["drafts verified"] > counts["drafts accepted"]


@pytest.mark.parametrize("p", [0.0, 0.5, 0.9, 1.0])
def test_m26_greedy_text_is_the_plain_one(plain: Model, p: float) -> None:
    with drafted_model("toy", ScriptedDrafter(p)) as model:
        for prompt in PROMPTS[:2]:
            expected = plain.generate(prompt, temperature=0, max_new=12)
            found = model.generate(prompt, temperature=0, max_new=12)
            assert found.ids == expected.ids and found.done.route == "spec_greedy"
            if p in (0.0, 1.0):
                for one in found.rounds[:-1]:
                    assert one.accepts == 5 * p and one.kind == ("bonus" if p else "correction")


def test_m27_one_seed_one_text_whatever_depth_window_and_drafter(plain: Model) -> None:
    """Sampled, for three seeds, of a prompt that nothing answers; every depth and window once."""
    ways = [{"spec_depth": depth} for depth in range(1, 7)]
    ways += [{"spec_window": window} for window in ("off", "auto", ("slot", 0.3), ("slot", 0.5), ("slot", 0.7, 2))]
    with load("toy", name="own") as model:
        for seed, options in zip((1, 7, 424242), ({}, {"top_p": 0.9}, PENALISED), strict=True):
            asked: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_new": 10, **options}
            expected = plain.generate(GUESS, **asked)
            for way in ways:
                found = model.generate(GUESS, **asked, **way)
                assert found.ids == expected.ids and found.stop_reason == expected.stop_reason, way
                assert found.done.route == "spec_sampled" and found.done.spec_config is not None
    assert len({plain.generate(GUESS, temperature=1.0, seed=s, max_new=10).ids for s in (1, 7, 424242)}) > 1


def test_m24_m25_penalties_are_inside_the_accept_walk(plain: Model) -> None:
    with load("toy", name="own") as model:
        for temperature in (0.0, 1.0):
            asked: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_new": 24, **PENALISED}
            asked["repetition_penalty"] = 1.8
            expected, found = (one.generate(PROMPTS[1], **asked) for one in (plain, model))
            assert found.ids == expected.ids and found.done.spec is not None and found.done.spec.accepted > 0
            bare = plain.generate(PROMPTS[1], temperature=temperature, seed=5, max_new=24)
            assert bare.ids != found.ids  # the penalties did something


@pytest.mark.parametrize("last_n", [0, 2])
def test_m25_a_draft_counts_for_the_rows_behind_it(make_model: MakeModel, last_n: int) -> None:
    """The network says one word for ever, and a penalty forbids what was said: in the same round too."""
    bias = dict.fromkeys(range(7), float("-inf"))  # control tokens
    asked: dict[str, Any] = {"temperature": 0, "presence_penalty": 100.0, "penalty_last_n": last_n, "max_new": 14}
    said = []
    for drafts in (None, lambda before: [300] * 5):
        model = make_model([[300] * 40], next_id=lambda ids: 300, drafts=drafts)
        said.append(model.generate("hi", logit_bias=bias, penalty_scope="generated", **asked))
    plain, spoken = said
    assert spoken.ids == plain.ids and len(set(plain.ids)) == (14 if last_n == 0 else 3)
    assert spoken.done.spec is not None and spoken.done.spec.accepted > 8


@pytest.mark.parametrize(
    ("temperature", "has_drafter", "penalised"), list(product((0.0, 1.0), (True, False), (True, False)))
)
def test_m22_temperature_and_drafter_decide_the_route(
    make_model: MakeModel, temperature: float, has_drafter: bool, penalised: bool
) -> None:
    tokens = FakeTokenizer()
    said = words(8, tokens)
    model = make_model([said], tokenizer=tokens, **({"drafts": follows(said)} if has_drafter else {}))
    reply = model.generate("hi", temperature=temperature, **(PENALISED if penalised else {}))
    assert reply.done.route == f"{'spec' if has_drafter else 'plain'}_{'sampled' if temperature else 'greedy'}"
    assert (reply.done.spec is not None) == has_drafter == bool(reply.rounds)


@pytest.mark.parametrize(("wrong", "accepts"), [(None, 5), (0, 0), (2, 2), (4, 4)])
def test_forced_patterns_give_their_accept_counts(make_model: MakeModel, wrong: int | None, accepts: int) -> None:
    tokens = FakeTokenizer()
    said = words(30, tokens)
    reply = make_model([said], tokenizer=tokens, drafts=follows(said, wrong)).generate("hi", temperature=0)
    assert {one.accepts for one in reply.rounds[:-2]} == {accepts}
    first = reply.rounds[0]
    expected = {"accepted": accepts, "rejected": int(accepts < 5), "unreached": max(0, 4 - accepts)}
    assert {name: [d.status for d in first.drafts].count(name) for name in expected} == expected  # type: ignore[arg-type]
    assert first.next is not None and first.next.id == said[accepts + 1]
    assert [d.target_choice for d in first.drafts[: accepts + 1]] == said[1 : accepts + 2][:5]


def test_m30_depth_one_verifies_no_draft(make_model: MakeModel) -> None:
    tokens = FakeTokenizer()
    said = words(6, tokens)
    model = make_model([said], tokenizer=tokens, drafts=follows(said))
    reply = model.generate("hi", temperature=0, spec_depth=1)
    assert {one.t_batch for one in reply.rounds} == {1} and reply.done.spec == SpecUsage(
        rounds=6, drafted=0, accepted=0
    )
    for depth in range(1, 7):
        assert max(one.t_batch for one in model.generate("hi", temperature=0, spec_depth=depth).rounds) == depth


def test_m29_a_window_changes_rounds_and_never_text(make_model: MakeModel) -> None:
    tokens = FakeTokenizer()
    said = words(24, tokens)
    conf = [3.0, 1.0, 0.1, -1.0, float("nan")]
    model = make_model([said], tokenizer=tokens, drafts=follows(said), conf_logits=conf)
    counts = {}
    for window in ("off", ("slot", 0.5), ("slot", 0.9), ("slot", 0.9, 4), ("slot", 0.01), "auto"):
        reply = model.generate("hi", temperature=0, spec_window=window)
        assert reply.ids == tuple(said)
        counts[window] = reply.rounds[0].verified
    assert counts["off"] == 5 and counts[("slot", 0.5)] == 3 and counts[("slot", 0.9)] == 1
    assert counts[("slot", 0.9, 4)] == 4 and counts[("slot", 0.01)] == 4  # the NaN ends the run


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"spec_depth": 0}, "spec_depth"),
        ({"spec_depth": 7}, "spec_depth"),
        ({"spec_depth": "four"}, "spec_depth"),
        ({"spec_window": "slot@0.5"}, "spec_window"),
        ({"spec_window": ("slot", 0)}, "spec_tau"),
        ({"spec_window": ("slot", 1.0)}, "spec_tau"),
        ({"spec_window": ("slot", 0.5, 5)}, "spec_window"),
        ({"spec_window": ("off", 0.5)}, "spec_tau"),
        ({"spec_mode": "fast"}, "spec_mode"),
        ({"spec_mode": "rejection", "spec_proposal": "greedy"}, "spec_proposal"),
        ({"spec_mode": "rejection", "sampler": "inverse_cdf"}, "spec_mode"),
        ({"spec": False, "spec_depth": 2}, "spec_depth"),
        ({"spec": "yes"}, "spec"),
    ],
)
def test_m29_a_bad_knob_is_refused_and_the_next_request_is_served(
    make_model: MakeModel, given: dict[str, Any], param: str
) -> None:
    tokens = FakeTokenizer()
    said = words(4, tokens)
    model = make_model([said], tokenizer=tokens, drafts=follows(said))
    with pytest.raises(RequestError) as raised:
        model.submit("hi", **given)
    assert raised.value.param == param
    assert model.generate("hi", temperature=0).ids == tuple(said)


@pytest.mark.parametrize("given", [{"spec": True}, {"spec_depth": 2}, {"spec_window": "off"}, {"spec_mode": "exact"}])
def test_m29_a_knob_without_a_drafter_has_nothing_to_act_on(make_model: MakeModel, given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="has nothing to act on: the checkpoint has no drafter"):
        make_model().submit("hi", **given)
    assert make_model().generate("hi", spec=False).done.route == "plain_sampled"


def test_m59_tokens_behind_an_end_are_discarded(make_model: MakeModel) -> None:
    tokens = FakeTokenizer()
    said = words(3, tokens)  # the pending token and two drafts; the next draft is the end
    after = [*said, tokens.eos_id, *words(9, tokens)[5:]]
    model = make_model([after], tokenizer=tokens, drafts=follows(after))
    reply = model.generate("hi", temperature=0)
    assert reply.ids == tuple(said) and reply.stop_reason == "stop"
    (last,) = reply.rounds
    assert [d.status for d in last.drafts] == ["accepted", "accepted", "accepted", "past_stop", "past_stop"]
    assert (last.accepts, last.judged, last.verified, last.emitted, last.stop) == (3, 3, 5, 2, "eos")
    assert last.next is None and last.kind is None
    stopped = model.generate("hi", temperature=0, stop="w1")
    (cut,) = stopped.rounds
    assert stopped.text.strip() == "w0" and cut.stop == "stop_string"
    assert [d.status for d in cut.drafts] == ["accepted", *["past_stop"] * 4]


def test_what_a_reply_leaves_is_what_the_plain_route_leaves(plain: Model) -> None:
    """Ends by an end token, a stop string and the budget inside a block: the caches stand at one position."""
    with load("toy", name="own") as model:
        for options in ({"max_new": 60}, {"max_new": 7}, {"max_new": 60, "stop": " is"}):
            left = []
            for one in (plain, model):
                one.cache.clear()
                one.chat(temperature=0, **options).send(PROMPTS[0])
                left.append(max(anchor.tokens for anchor in one.cache.stats().anchors))
            assert left[0] == left[1], options


def test_m21_a_chat_goes_on_after_rounds_as_after_single_steps(plain: Model) -> None:
    with load("toy", name="own") as model:
        said = []
        for one in (plain, model):
            chat = one.chat(temperature=1.0, max_new=16)
            said.append([chat.send(prompt, seed=3).ids for prompt in PROMPTS])
    assert said[0] == said[1]


def test_rejection_is_another_text_of_the_same_model_and_replays(tiny: Path) -> None:
    with load(tiny) as model:
        asked: dict[str, Any] = {"prompt_ids": list(range(300, 340)), "temperature": 1.0, "seed": 3, "max_new": 24}
        exact, rejected = (model.generate(**asked, spec_mode=mode) for mode in ("exact", "rejection"))
        assert exact.ids == model.generate(**asked, spec=False).ids != rejected.ids
        assert rejected.rounds[0].mode == "rejection" and model.replay(rejected.recipe).ids == rejected.ids
        assert rejected.recipe.spec == SpecConfig(mode="rejection")
        greedy = [model.generate(**asked | {"temperature": 0.0}, spec_mode=m).ids for m in ("exact", "rejection")]
        assert greedy[0] == greedy[1]
    with load(tiny, drafter=False) as other:
        assert other.replay(exact.recipe).ids == exact.ids
        with pytest.raises(Exception, match="depend on the drafter"):
            other.replay(rejected.recipe)


class TestLoading:
    def test_m08_residency_decides_whether_the_route_is_armed(self, tiny: Path) -> None:
        asked: dict[str, Any] = {"prompt_ids": list(range(300, 340)), "temperature": 0, "max_new": 6}
        with load(tiny) as auto, load(tiny, drafter=False) as off, load(tiny, drafter=True) as on:
            replies = [model.generate(**asked) for model in (auto, off, on)]
            assert len({reply.ids for reply in replies}) == 1
            routes = [reply.done.route for reply in replies]
            assert routes == ["spec_greedy", "plain_greedy", "spec_greedy"]
            assert auto.spec.block_size == 5 and auto.info.drafter == "DSpark, 5 drafts a round"
            assert off.spec.config is None and "drafter=False" in str(off.spec)
            assert on.measure_spec().verify_ms and on.spec.draft_ms is not None

    @pytest.mark.parametrize("kind", ["none", "nextn"])
    def test_m08_a_drafter_that_is_not_there_is_refused_by_name(self, tmp_path: Path, kind: Any) -> None:
        folder = write_tiny_tokenizer(write_tiny_checkpoint(tmp_path, drafter=kind))
        with pytest.raises(RequestError, match="NextN block" if kind == "nextn" else "has no drafter") as raised:
            load(folder, drafter=True)
        assert raised.value.param == "drafter"
        with pytest.raises(RequestError, match="spec_depth has nothing to act on"):
            load(folder, spec_depth=2)
        with load(folder) as model:
            assert model.generate(prompt_ids=[300, 301], max_new=2).done.route.startswith("plain")

    @pytest.mark.parametrize(
        ("given", "param"),
        [
            *(({"spec_depth": depth}, "spec_depth") for depth in (0, 7, "four", True)),
            ({"spec_window": "slot@0.5"}, "spec_window"),
            ({"spec_window": ("slot", 0.5, 5)}, "spec_window"),
            ({"drafter": "yes"}, "drafter"),
            ({"drafter": False, "spec_depth": 2}, "spec_depth"),
        ],
    )
    def test_m30_bad_knobs_refuse_at_load(self, tiny: Path, given: dict[str, Any], param: str) -> None:
        with pytest.raises(RequestError) as raised:
            load(tiny, **given)
        assert raised.value.param == param

    def test_m30_the_environment_caps_the_depth(self, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for bad in ("0", "four", "", "7"):
            monkeypatch.setenv("DSV4NB_SPEC_DEPTH", bad)
            with pytest.raises(RequestError, match="DSV4NB_SPEC_DEPTH"):
                load(tiny)
        monkeypatch.setenv("DSV4NB_SPEC_DEPTH", "2")
        with load(tiny) as model, load(tiny, spec_depth=3) as other:
            assert model.limits.spec == SpecConfig(depth=2) and other.limits.spec == SpecConfig(depth=3)
            assert max(r.t_batch for r in model.generate(prompt_ids=[300], max_new=6).rounds) == 2

    def test_a_broken_drafter_is_named_and_the_model_decodes_plainly(self, tiny: Path, tmp_path: Path) -> None:
        folder = tmp_path / "broken"
        folder.mkdir()
        name = "mtp.2.confidence_head.proj.weight"
        for file in tiny.iterdir():
            if file.suffix == ".safetensors" and name in (tensors := load_file(file)):
                tensors[name].view(-1)[0] = float("nan")
                save_file(tensors, folder / file.name, metadata={"format": "pt"})
            else:
                (folder / file.name).symlink_to(file)
        with load(folder) as model:
            assert f"{name} is not finite" in model.info.drafter and model.spec.config is None
            assert model.generate(prompt_ids=[300], max_new=3).done.route.startswith("plain")
        with pytest.raises(CheckpointError, match=f"{name} is not finite"):
            load(folder, drafter=True)

    def test_a_drafter_that_breaks_in_a_run_is_given_up(self, make_model: MakeModel) -> None:
        from dsv4nb.errors import DrafterFault

        tokens = FakeTokenizer()
        said = words(12, tokens)
        calls = 0

        def drafts(before: tuple[int, ...]) -> list[int]:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise DrafterFault("the drafter's row 0 is not finite")
            return follows(said)(before)

        model = make_model([said], tokenizer=tokens, drafts=drafts)
        first = model.generate("hi", temperature=0)
        assert first.ids == tuple(said) and len(first.rounds) == 1 and first.done.route == "spec_greedy"
        assert first.done.spec_note == "plain: the drafter's row 0 is not finite"
        again = model.generate("hi", temperature=0)
        assert again.ids == tuple(said) and again.done.route == "plain_greedy" and again.done.spec is None
        assert calls == 2 and "given up" in str(model.spec) and again.done.spec_note == first.done.spec_note


def test_rounds_come_behind_the_tokens_they_are_about(make_model: MakeModel) -> None:
    tokens = FakeTokenizer()
    said = words(14, tokens)
    model = make_model([said], tokenizer=tokens, drafts=follows(said))
    seen, heard = 0, 0
    for event in model.stream("hi", temperature=0):
        if isinstance(event, Round):
            heard += event.emitted
            assert seen == 1 + heard
        elif getattr(event, "id", None) is not None:
            seen += 1
    assert seen == 14


def test_a_grammar_bounds_the_drafts(plain: Model) -> None:
    with load("toy", name="own") as model:
        asked: dict[str, Any] = {"regex": "[A-Z][a-z ]{3,20}", "temperature": 1.0, "seed": 2, "max_new": 20}
        expected, found = (one.generate(PROMPTS[0], **asked) for one in (plain, model))
        assert found.ids == expected.ids and found.done.spec is not None and found.done.spec.accepted > 0
