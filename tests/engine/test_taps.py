"""Watched forwards: nothing changes, and what is told is what the whole-sequence network does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.contract import FP32_PLAIN, REF_FP8_ROUND
from dsv4nb.engine.cpu import CpuEngine
from dsv4nb.engine.state import CpuState
from dsv4nb.engine.taps import Reads, Routes, Tap, Taps, Watchable, tap_names, tapped
from dsv4nb.errors import EngineError, RequestError
from dsv4nb.reference.layers import Attention
from dsv4nb.reference.loading import load_network
from dsv4nb.reference.rotary import frequencies

MakeEngine = Callable[..., CpuEngine]

LENGTH = 300  # two entries of 128, 75 of 4 with 16 picked, four windows of 64
ROUNDING = 1e-5  # sums in another order, relative to the largest


class Told:
    """Everything that a run tells, by layer and position."""

    def __init__(self, places: tuple[str, ...] = ()) -> None:
        self.reads: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self.routes: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.values: dict[tuple[str, int], Tensor] = {}
        self.taps = Taps(
            [Tap(place=place, see=lambda v, at, place=place: self._value(place, v, at)) for place in places],  # type: ignore[misc]
            on_reads=self._reads,
            on_routes=self._routes,
        )

    def _value(self, place: str, values: Tensor, positions: Tensor) -> None:
        self.values |= {(place, int(p)): values[i] for i, p in enumerate(positions)}

    def _reads(self, reads: Reads) -> None:
        for i, p in enumerate(reads.positions):
            n = int((reads.entries[i] >= 0).sum())
            scores = torch.empty(0) if reads.scores is None else reads.scores[i, :n]
            parts = reads.window[i], reads.sink[i], reads.entries[i, :n], reads.mass[i, :, :n], scores
            assert not reads.mass[i, :, n:].any()
            self.reads[reads.layer, int(p)] = parts

    def _routes(self, routes: Routes) -> None:
        self.routes |= {
            (routes.layer, int(p)): (routes.experts[i], routes.weights[i]) for i, p in enumerate(routes.positions)
        }


def run(engine: CpuEngine, ids: list[int], taps: Taps | None = None, cuts: tuple[int, ...] = ()) -> tuple[Any, str]:
    """Prefill `ids` in pieces; return the last logits and the digest of the caches."""
    state = engine.new_state()
    assert isinstance(state, CpuState)
    with tapped(engine, taps):
        for first, last in zip((0, *cuts), (*cuts, len(ids)), strict=True):
            logits = engine.prefill(state, ids[first:last]).logits
    digest = state.digest()
    engine.release(state)
    return logits, digest


@pytest.mark.parametrize("contract", [FP32_PLAIN, REF_FP8_ROUND], ids=lambda c: c.name)
def test_watching_and_putting_back_what_is_there_change_no_bit(
    make_engine: MakeEngine, prompt: list[int], contract: Any
) -> None:
    engine = make_engine(contract)
    names = tap_names(engine.config.num_hidden_layers)
    plain = run(engine, prompt)
    told = Told(names)
    seen = run(engine, prompt, told.taps)
    same = run(engine, prompt, Taps([Tap(place=name, see=lambda values, _: values) for name in names]))
    for other in (seen, same):
        assert (other[0] == plain[0]).all() and other[1] == plain[1]
    assert {place for place, _ in told.values} == set(names)
    assert len(told.values) == len(names) * len(prompt)


def test_how_a_prompt_is_cut_changes_nothing_that_is_told(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine, ids = make_engine(), prompt[:LENGTH]
    names = tap_names(engine.config.num_hidden_layers)
    whole, cut = Told(names), Told(names)
    run(engine, ids, whole.taps)
    run(engine, ids, cut.taps, cuts=(1, 2, 9, 63, 64, 67, 128, 201, 299))
    assert whole.reads.keys() == cut.reads.keys() and whole.values.keys() == cut.values.keys()
    for key, value in whole.values.items():
        assert torch.equal(value, cut.values[key]), key
    for key, parts in whole.reads.items():
        assert torch.equal(parts[2], cut.reads[key][2]) and torch.equal(parts[4], cut.reads[key][4]), key
        for part, other in zip(parts, cut.reads[key], strict=True):
            assert torch.allclose(part.float(), other.float(), rtol=0, atol=1e-6), key
    assert all(
        torch.equal(e, cut.routes[key][0]) and torch.equal(w, cut.routes[key][1])
        for key, (e, w) in whole.routes.items()
    )


def brute_force(attn: Attention, x: Tensor, trace: dict[str, Tensor], token: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the masses [H, token + 1] of all rows, [H, C] of all entries, and [H] of the sink, one token alone."""
    config, positions = attn.config, torch.arange(x.shape[1])
    freq = frequencies(config, compressed=attn.ratio > 0, device=x.device)
    query = attn._query(attn.q_norm(attn.wq_a(x)), positions, freq)[0, token]
    rows = attn._rows(x, positions, freq)[0]
    near = [p for p in range(token + 1) if token - p < config.sliding_window]
    entries = trace.get(f"{attn.name}compressed", torch.empty(1, 0, config.head_dim))[0]
    far = [w for w in range(len(entries)) if attn.ratio * (w + 1) <= token + 1]
    if attn.ratio == 4:
        far = [w for w in far if trace[f"{attn.name}index_keep"][0, token, w]]
    masses = torch.zeros(config.num_attention_heads, token + 1), torch.zeros(config.num_attention_heads, len(entries))
    sink = torch.zeros(config.num_attention_heads)
    for head in range(config.num_attention_heads):
        z = {("row", p): float(query[head] @ rows[p]) * config.head_dim**-0.5 for p in near}
        z |= {("entry", w): float(query[head] @ entries[w]) * config.head_dim**-0.5 for w in far}
        top = max(z.values())
        rest = math.exp(float(attn.attn_sink[head]) - top)
        total = sum(math.exp(value - top) for value in z.values()) + rest
        for (kind, number), value in z.items():
            masses[kind == "entry"][head, number] = math.exp(value - top) / total
        sink[head] = rest / total
    return *masses, sink


def test_what_is_told_is_what_the_whole_sequence_network_does(
    make_engine: MakeEngine, checkpoint: Checkpoint, prompt: list[int]
) -> None:
    """Section 2, idea 5: picks and scores equal the reference; idea 7: so do the experts."""
    engine, ids = make_engine(), prompt[:LENGTH]
    told = Told(tap_names(engine.config.num_hidden_layers))
    run(engine, ids, told.taps)

    network = load_network(checkpoint, FP32_PLAIN)
    network.mode.trace = trace = {}
    inputs: dict[int, Tensor] = {}
    for layer, block in enumerate(network.blocks):
        block.attn.register_forward_pre_hook(lambda _, args, layer=layer: inputs.update({layer: args[0]}))  # type: ignore[misc]
    with torch.inference_mode():
        network(torch.tensor([ids]))
        assert {engine.config.kind(layer) for layer in inputs} == {"swa", "csa", "hca"}
        for layer, block in enumerate(network.blocks):
            stream = torch.stack([told.values[f"layers.{layer}.out", p] for p in range(LENGTH)])
            expected = trace[f"layers.{layer}.stream"][0]
            assert (stream - expected).abs().max() <= ROUNDING * expected.abs().max()
            x = torch.stack([told.values[f"layers.{layer}.attention.in", p] for p in range(LENGTH)])
            assert (x - inputs[layer][0]).abs().max() <= ROUNDING * inputs[layer].abs().max()
            chosen = torch.stack([told.routes[layer, p][0] for p in range(LENGTH)])
            assert torch.equal(chosen, trace[f"layers.{layer}.ffn.route_idx"][0])
            shares = torch.stack([told.routes[layer, p][1] for p in range(LENGTH)]).sort(-1).values
            wanted = trace[f"layers.{layer}.ffn.route_wt"][0].sort(-1).values
            assert torch.allclose(shares, wanted, rtol=0, atol=ROUNDING)
            for token in (0, 3, 4, 62, 63, 64, 67, 127, 128, 255, LENGTH - 1):
                near, far, sink = brute_force(block.attn, inputs[layer], trace, token)
                window, rest, entries, mass, scores = told.reads[layer, token]
                n = min(token + 1, window.shape[1])
                assert torch.allclose(window[:, -n:], near[:, -n:], rtol=0, atol=ROUNDING)
                assert not window[:, :-n].any()
                assert torch.allclose(rest, sink, rtol=0, atol=ROUNDING)
                assert entries.tolist() == far.any(0).nonzero()[:, 0].tolist()
                assert torch.allclose(mass, far[:, entries], rtol=0, atol=ROUNDING)
                assert torch.allclose(window.sum(-1) + mass.sum(-1) + rest, torch.ones(len(rest)))
                if block.attn.ratio == 4 and entries.numel():
                    all_scores = trace[f"layers.{layer}.attn.index_score"][0]
                    limit = ROUNDING * float(all_scores.abs().max())
                    assert torch.allclose(scores, all_scores[token, entries], rtol=0, atol=limit)
                else:
                    assert not scores.numel()


def test_the_last_streams_read_out_are_the_logits_of_a_forward(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine = make_engine()
    assert isinstance(engine, Watchable)
    place = tap_names(engine.config.num_hidden_layers)[-1]
    told = Told((place,))
    state = engine.new_state()
    engine.prefill(state, prompt[:61])
    with engine.tapped(told.taps):
        logits = engine.forward_rows(state, prompt[61:68])
    for wanted in ([61, 62, 63, 64, 65, 66, 67], [63], [61, 65]):
        streams = torch.stack([told.values[place, p] for p in wanted])
        read = engine.read_out(streams, torch.tensor(wanted))
        assert (read.numpy() == logits[[p - 61 for p in wanted]]).all(), wanted
    engine.release(state)


def test_a_change_is_seen_behind_it_and_nowhere_before(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine, at, place = make_engine(), 70, "layers.1.middle"
    names = tap_names(engine.config.num_hidden_layers)
    plain, changed = Told(names), Told(names)
    run(engine, prompt[:100], plain.taps)
    double = Tap(place=place, see=lambda values, _: 2 * values, positions=torch.tensor([at]))
    changed.taps.by_place[place].insert(0, double)
    run(engine, prompt[:100], changed.taps)
    assert torch.equal(changed.values[place, at], 2 * plain.values[place, at])
    # other positions learn of it by the attention of the next layer, those before it never
    first = {at: names.index(place)} | dict.fromkeys(range(at + 1, 100), names.index("layers.2.attention.out"))
    for (name, p), value in plain.values.items():
        is_behind = p >= at and names.index(name) >= first[p]
        # what layer 2 reads of position `at` is in its window for all 29 behind it
        assert torch.equal(value, changed.values[name, p]) != is_behind, (name, p)


FAULTS = {
    "failed: ZeroDivisionError": lambda values: 1 / 0,
    "returned torch.float32 [5, 4]; what it was given is torch.float32 [5, 4, 128]": lambda values: values[:, :, 0],
    "returned torch.float64": lambda values: values.double(),
    "returned str": lambda values: "no",
    "not finite": lambda values: values / 0,
}


@pytest.mark.parametrize("said", FAULTS)
def test_a_tap_that_fails_is_named_and_the_state_goes_on(make_engine: MakeEngine, prompt: list[int], said: str) -> None:
    engine = make_engine()
    state = engine.new_state()
    engine.prefill(state, prompt[:40])
    with (
        engine.tapped(Taps([Tap(place="layers.1.out", see=lambda values, _: FAULTS[said](values))])),
        pytest.raises(RequestError, match=r"layers\.1\.out") as caught,
    ):
        engine.forward_rows(state, prompt[40:45])
    assert said in str(caught.value) and caught.value.param == "change"
    assert state.pos == 40
    fresh = engine.new_state()
    engine.prefill(fresh, prompt[:40])
    assert (engine.forward_rows(state, prompt[40:45]) == engine.forward_rows(fresh, prompt[40:45])).all()


def test_only_wanted_layers_and_positions_are_told(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine, told = make_engine(), Told()
    told.taps.layers, told.taps.positions = frozenset({1}), torch.tensor([5, 70])
    run(engine, prompt[:100], told.taps)
    assert set(told.reads) == set(told.routes) == {(1, 5), (1, 70)}


def test_taps_inside_taps_leave_the_outer_ones_as_they_were(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine, outer, inner = make_engine(), Told(("embed",)), Told(("embed",))
    with engine.tapped(outer.taps):
        run(engine, prompt[:3], inner.taps)
        assert not outer.values and len(inner.values) == 3
        run(engine, prompt[:2])
    run(engine, prompt[:9])
    assert len(outer.values) == 2 and len(inner.values) == 3


def test_a_closed_engine_has_nothing_to_watch(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.close()
    with pytest.raises(EngineError, match="closed"), engine.tapped(Taps()):
        pass
