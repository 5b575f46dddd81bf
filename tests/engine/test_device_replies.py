"""Whole replies of a model on a GPU: what the GPU chooses is what the host would have chosen, on every route.

Once with the kernels' twins, which any machine runs, and once on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dsv4nb
from dsv4nb import model as assembling
from dsv4nb.config import SamplerConfig
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.protocol import ChooseDraft, DecodeState, Proposal, Verified
from dsv4nb.events import Generation, Round
from dsv4nb.handle import Model
from dsv4nb.session import choosing
from dsv4nb.testing.scripted_drafter import ScriptedDrafter, drafted_model
from dsv4nb.testing.twin_kernels import twin_kernels

pytestmark = pytest.mark.twins

ASKED = "What is the capital of France?"
NEW = 14
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 1},
    "another seed": {"temperature": 2.0, "seed": 2**64 - 1},
    "hot": {"temperature": 3.0, "seed": 3},
    "top-p": {"temperature": 4.0, "top_p": 0.95, "seed": 4},
    "top-k": {"temperature": 6.0, "top_k": 12, "seed": 5},
    "min-p": {"temperature": 5.0, "min_p": 0.01, "seed": 6},
}
ROUTES: dict[str, dict[str, Any]] = {
    "plain": {"spec": False},
    "rounds": {},
    "greedy drafts": {"spec_proposal": "greedy"},
    "few rows": {"spec_depth": 3},
    "window": {"spec_window": ("slot", 0.4, 1)},
}
ON_HOST: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {40: 3.0}},
    "inverse CDF": {"sampler": "inverse_cdf"},
    "grammar": {"regex": "[A-Za-z .]{5,60}"},
    "rejection": {"spec_mode": "rejection"},
}


@pytest.fixture(scope="module", params=["twins", pytest.param("gpu", marks=pytest.mark.gpu)])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    if request.param == "gpu":
        with dsv4nb.load("toy", devices=0, max_seq=384, warmup=False) as model:
            yield model
        return
    load = DeviceEngine.from_checkpoint

    def from_checkpoint(*args: Any, **options: Any) -> DeviceEngine:
        assert options.pop("device") == ["cuda:0"]
        return load(*args, device="cpu", **options)

    with pytest.MonkeyPatch.context() as patch, twin_kernels():
        patch.setattr(assembling, "require_gpus", lambda ids, placement: ids)
        patch.setattr(DeviceEngine, "from_checkpoint", from_checkpoint)
        with dsv4nb.load("toy", devices=0, max_seq=384, warmup=False) as model:
            yield model


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the device was let choose, and how often the host asked for rows."""
    counted: Counter[str] = Counter()
    draw, forward, draft = DeviceEngine.draw_rows, DeviceEngine.forward_rows, DeviceEngine.draft
    both = DeviceEngine.draft_and_draw

    def draw_rows(self: DeviceEngine, state: DecodeState, tokens: Any, config: SamplerConfig) -> Verified:
        counted["drawn"] += 1
        return draw(self, state, tokens, config)

    def forward_rows(self: DeviceEngine, state: DecodeState, tokens: Any) -> Any:
        counted["rows"] += 1
        return forward(self, state, tokens)

    def drafted(self: DeviceEngine, state: DecodeState, pending: int, choose: ChooseDraft) -> Proposal:
        proposal = draft(self, state, pending, choose)
        counted["drafts drawn" if proposal.margins else "drafts"] += 1
        return proposal

    def together(self: DeviceEngine, *args: Any, **options: Any) -> tuple[Proposal, Verified]:
        counted.update(("drawn", "drafts drawn", "together"))
        return both(self, *args, **options)

    monkeypatch.setattr(DeviceEngine, "draft_and_draw", together)
    monkeypatch.setattr(DeviceEngine, "draw_rows", draw_rows)
    monkeypatch.setattr(DeviceEngine, "forward_rows", forward_rows)
    monkeypatch.setattr(DeviceEngine, "draft", drafted)
    return counted


def on_host(model: Model, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Generation:
    """Generate without any choice on the device."""
    with monkeypatch.context() as patch:
        patch.setattr(choosing, "can_draw", lambda config: False)
        return model.generate(ASKED, max_new=NEW, **options)


def told(round: Round) -> list[tuple[Any, ...]]:
    return [(draft.id, draft.conf_logit, draft.margin, draft.status, draft.target_choice) for draft in round.drafts]


@pytest.mark.parametrize("route", ROUTES)
def test_m27_the_device_says_what_the_host_would_have_said(
    model: Model, chosen: Counter[str], monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    texts = set()
    for setting, options in SETTINGS.items():
        asked = options | ROUTES[route]
        chosen.clear()
        wanted = on_host(model, monkeypatch, **asked)
        assert chosen["drawn"] == chosen["drafts drawn"] == 0 < chosen["rows"]
        chosen.clear()
        found = model.generate(ASKED, max_new=NEW, **asked)
        assert (found.ids, found.text, found.stop_reason) == (wanted.ids, wanted.text, wanted.stop_reason), setting
        assert chosen["rows"] == chosen["drafts"] == 0 < chosen["drawn"]
        assert bool(chosen["drafts drawn"]) == (route != "plain")
        assert bool(chosen["together"]) == (route in ("rounds", "greedy drafts", "few rows"))
        assert list(map(told, found.rounds)) == list(map(told, wanted.rounds))
        for ours, theirs in zip(found.rounds, wanted.rounds, strict=True):
            for a, b in zip(ours.drafts, theirs.drafts, strict=True):
                assert a.q == pytest.approx(b.q, rel=1e-4, abs=1e-9)
                assert (a.p is None) == (b.p is None) == (a.status == "not_verified")
                assert a.p is None or a.p == pytest.approx(b.p, rel=1e-4, abs=1e-9)
        texts.add(found.text)
    assert len(texts) > 3


@pytest.mark.parametrize("reason", ON_HOST)
def test_where_more_than_the_row_decides_the_host_chooses(model: Model, chosen: Counter[str], reason: str) -> None:
    if reason == "grammar":
        pytest.importorskip("llguidance")
    options = {"temperature": 1.0, "seed": 1} | ON_HOST[reason]
    found = model.generate(ASKED, max_new=NEW, **options)
    assert chosen["drawn"] == 0 < chosen["rows"]
    assert chosen["drafts drawn"] == 0 < chosen["drafts"]
    if reason == "rejection":  # keeps the distribution, not the text
        return
    assert model.generate(ASKED, max_new=NEW, spec=False, **options).ids == found.ids


@pytest.mark.parametrize("route", ["plain", "rounds", "window"])
def test_log_probabilities_are_told_of_what_the_device_chose(
    model: Model, chosen: Counter[str], monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    options = SETTINGS["hot"] | ROUTES[route] | {"logprobs": 3}
    wanted = on_host(model, monkeypatch, **options)
    chosen.clear()
    found = model.generate(ASKED, max_new=NEW, **options)
    assert chosen["rows"] == 0 < chosen["drawn"]
    assert (found.ids, found.logprobs) == (wanted.ids, wanted.logprobs) and len(found.logprobs) == len(found.ids)


def test_settings_may_change_from_one_message_to_the_next(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for is_on_host in (True, False):
        model.cache.clear()
        with monkeypatch.context() as patch:
            if is_on_host:
                patch.setattr(choosing, "can_draw", lambda config: False)
            chat, said = model.chat(max_new=NEW), list[str]()
            for setting in ("sampled", "another seed", "hot", "greedy", "top-k"):
                reply = chat.send("And now?" if said else ASKED, **SETTINGS[setting])
                said.append(reply.text)
            fork = chat.fork()
            said += [fork.send("Hello!", **SETTINGS["top-p"]).text, chat.regenerate(**SETTINGS["min-p"]).text]
            assert reply.done.n_cached > 0
        texts.append(said)
    assert texts[0] == texts[1] and len(set(texts[0])) > 3


@pytest.mark.parametrize("spec", [False, True])
def test_the_row_that_a_run_leaves_is_the_same_bits(model: Model, monkeypatch: pytest.MonkeyPatch, spec: bool) -> None:
    rows = []
    for is_on_host in (True, False):
        model.cache.clear()
        with monkeypatch.context() as patch:
            if is_on_host:
                patch.setattr(choosing, "can_draw", lambda config: False)
            model.chat(max_new=NEW, spec=spec).send(ASKED, temperature=0.0)
        anchor = max(model._parts.server.prefixes.anchors, key=lambda anchor: len(anchor.ids))
        assert anchor.logits is not None and anchor.logits.base is None
        rows.append((anchor.ids, anchor.logits))
        model.generate(ASKED, temperature=1.0, max_new=3)  # other forwards
    (ids, row), (other_ids, other_row) = rows
    assert ids == other_ids and np.array_equal(row, other_row)


def test_another_drafter_than_the_engines_own_is_asked(model: Model, chosen: Counter[str]) -> None:
    with drafted_model("toy", ScriptedDrafter(1.0), devices=0, max_seq=384, warmup=False) as drafted:
        reply = drafted.generate(ASKED, max_new=NEW, **SETTINGS["hot"])
    assert chosen["together"] == chosen["drafts"] == 0 < chosen["drawn"]
    assert reply.ids == model.generate(ASKED, max_new=NEW, spec=False, **SETTINGS["hot"]).ids
    assert all(round.accepts == round.t_batch - 1 for round in reply.rounds[:-1])
