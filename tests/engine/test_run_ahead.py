"""Steps and rounds that are begun before they are asked for: whatever is asked for then is what it would have been.

On one GPU, on a pair and on a pipeline; once with the kernels' twins, which any machine runs, and once on GPUs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.config import SamplerConfig
from dsv4nb.engine import extent
from dsv4nb.engine.accept import rows_kept
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.device_forward import DeviceForward
from dsv4nb.engine.device_state import DeviceSnapshot, DeviceState
from dsv4nb.engine.pair_forward import PairForward
from dsv4nb.engine.plain_choice import GREEDY, PlainChoice
from dsv4nb.engine.protocol import Verified
from dsv4nb.engine.rank_draws import Flight
from dsv4nb.errors import EngineError
from dsv4nb.testing.placements import PLACEMENTS
from dsv4nb.testing.twin_kernels import twin_kernels

pytestmark = pytest.mark.twins

MAX_SEQ = 320
FEWEST = 64  # positions of the smallest extent here, so that states grow
HOT = SamplerConfig(temperature=4.0, seed=11)
CONFIGS = (GREEDY, HOT, SamplerConfig(temperature=3.0, top_p=0.9, seed=5))
ON_GPUS = [
    pytest.param("one gpu", marks=pytest.mark.gpu),
    pytest.param("pair of gpus", marks=pytest.mark.gpu2),
    pytest.param("pipeline of gpus", marks=pytest.mark.gpu2),
]
PAIRS = ["pair", ON_GPUS[1]]

Engines = tuple[DeviceEngine, DeviceEngine]


@pytest.fixture(scope="module", params=["one", "pair", "pipeline", *ON_GPUS])
def engines(request: pytest.FixtureRequest, toy: Checkpoint) -> Iterator[Engines]:
    """One that runs ahead, and one on the same weights that does not."""
    places, kind = PLACEMENTS[request.param]
    with nullcontext() if "gpu" in request.param else twin_kernels():
        ahead = DeviceEngine.from_checkpoint(
            toy,
            device=places,
            placement=kind,  # type: ignore[arg-type]
            max_seq=MAX_SEQ,
            prefill="exact",
        )
        options: dict[str, Any] = {"max_seq": MAX_SEQ, "prefill": "exact", "links": ahead.links}
        behind = DeviceEngine(ahead.ranks, toy.config, toy.contract, run_ahead=False, **options)
        yield ahead, behind
        behind.close()
        ahead.close()


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch, engines: Engines) -> None:
    monkeypatch.setattr(extent, "FEWEST", FEWEST)
    for engine in engines:
        engine._shelf.clear()


@pytest.fixture
def begun(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of the steps that were begun ahead, of a round the last that it may have."""
    positions = list[int]()
    for engine in engines:
        forward = engine._forward
        assert forward is not None

        def noted(
            caches: Any, rows: int, stop: int, *args: Any, go_on: Callable[..., Flight] = forward.go_on
        ) -> Flight:
            positions.append(stop - rows)
            return go_on(caches, rows, stop, *args)

        monkeypatch.setattr(forward, "go_on", noted)
    return positions


def forward_of(engine: DeviceEngine) -> DeviceForward:
    assert engine._forward is not None
    return engine._forward


def standing(engine: DeviceEngine, ids: Sequence[int]) -> DeviceState:
    state = engine.new_state()
    engine.prefill(state, ids)
    return state


def step(engine: DeviceEngine, state: DeviceState, token: int, config: SamplerConfig) -> int:
    found = engine.draw_rows(state, [token], config)
    engine.commit(state, 1)
    return found.ids[0]


def said(engine: DeviceEngine, state: DeviceState, token: int, n: int, config: SamplerConfig = HOT) -> list[int]:
    """Say n tokens, each behind the one before."""
    ids = list[int]()
    for _ in range(n):
        ids.append(step(engine, state, ids[-1] if ids else token, config))
    return ids


def round_of(engine: DeviceEngine, state: DeviceState, pending: int, config: SamplerConfig, rows: int = 6) -> list[int]:
    """Play a round; return the tokens that it gives."""
    proposal, found = engine.draft_and_draw(state, pending, rows, drafts_by=config, config=config)
    kept = rows_kept(proposal.ids[: rows - 1], found.ids)
    engine.commit(state, kept)
    return list(found.ids[:kept])


def played(engine: DeviceEngine, state: DeviceState, pending: int, n: int, config: SamplerConfig = GREEDY) -> list[int]:
    """Play n rounds, each behind the one before; return the tokens that they give."""
    ids = [pending]
    for _ in range(n):
        ids += round_of(engine, state, ids[-1], config)
    return ids[1:]


def ending(engine: DeviceEngine, *states: DeviceState) -> None:
    for state in states:
        engine.release(state)


@pytest.mark.parametrize(("config", "length"), [(HOT, 76), *((config, 12) for config in CONFIGS)])
def test_m26_a_reply_is_the_one_of_an_engine_that_waits(
    engines: Engines, facts: list[int], begun: list[int], config: SamplerConfig, length: int
) -> None:
    """Across the ends of extents, with the longer one."""
    found = []
    for engine in engines:
        state, rows = standing(engine, facts[:58]), list[bytes]()
        token, ids = facts[58], list[int]()
        for _ in range(length):
            drawn = engine.draw_rows(state, [token], config)
            if len(ids) % 7 == 0:
                rows.append(drawn.rows[0].tobytes())
            engine.commit(state, 1)
            token = drawn.ids[0]
            ids.append(token)
        found.append((ids, rows, state.digest()))
        ending(engine, state)
    assert found[0] == found[1]
    # from the second step on; what needs more room, or another graph, is not begun
    assert begun == [pos for pos in range(60, 59 + length) if pos not in (64, 128)]


def test_rows_are_the_same_bits_whenever_somebody_looks(engines: Engines, facts: list[int]) -> None:
    wanted = list[Any]()
    for engine in reversed(engines):
        for late in (0, 1, 3):
            state, token, held = standing(engine, facts[:40]), facts[40], list[Any]()
            seen = list[Any]()
            for _ in range(6):
                drawn = engine.draw_rows(state, [token], HOT)
                engine.commit(state, 1)
                token = drawn.ids[0]
                held.append(drawn.rows)
                if len(held) > late:
                    seen.append(held.pop(0)[0].copy())
            ending(engine, state)
            seen += [rows[0].copy() for rows in held]
            wanted = wanted or seen
            assert np.array_equal(np.stack(seen), np.stack(wanted)), late


@pytest.mark.parametrize(("config", "rounds"), [(GREEDY, 14), (HOT, 10), (CONFIGS[2], 5)])
def test_m26_rounds_are_those_of_an_engine_that_waits(
    engines: Engines, facts: list[int], begun: list[int], config: SamplerConfig, rounds: int
) -> None:
    """Across the ends of extents, with the longer one; and what single steps say."""
    found, kept = [], list[int]()
    for engine in engines:
        state, told, pending = standing(engine, facts[:44]), list[Any](), facts[44]
        for number in range(rounds):
            proposal, verified = engine.draft_and_draw(state, pending, 6, drafts_by=config, config=config)
            assert proposal.ms is not None and proposal.ms > 0
            rows = (proposal.rows[4].tobytes(), verified.rows[5].tobytes()) if number % 3 == 0 else ()
            told.append((proposal.ids, proposal.conf_logits, proposal.margins, proposal.probs, rows))
            told.append((verified.ids, verified.probs))
            kept.append(rows_kept(proposal.ids, verified.ids))
            engine.commit(state, kept[-1])
            pending = verified.ids[kept[-1] - 1]
        found.append((told, state.pos, state.digest()))
        if rounds < 14:
            single = standing(engine, facts[:44])
            ids = said(engine, single, facts[44], state.pos - 44, config)
            assert (ids[-1], single.digest()) == (pending, state.digest())
            ending(engine, single)
        ending(engine, state)
    assert found[0] == found[1]
    print(f"rows kept: {kept}; begun: {begun}")
    assert len(set(kept)) > 1
    assert len([pos for pos in begun if pos >= 44]) > rounds // 2


def test_rows_of_rounds_are_the_same_bits_whenever_somebody_looks(engines: Engines, facts: list[int]) -> None:
    wanted = list[Any]()
    for engine in reversed(engines):
        for late in (0, 2):
            state, pending, held, seen = standing(engine, facts[:30]), facts[30], list[Any](), list[Any]()
            for _ in range(5):
                proposal, verified = engine.draft_and_draw(state, pending, 6, drafts_by=HOT, config=HOT)
                kept = rows_kept(proposal.ids, verified.ids)
                engine.commit(state, kept)
                pending = verified.ids[kept - 1]
                held.append((proposal.rows, verified.rows))
                if len(held) > late:
                    seen += [np.stack(list(rows)) for rows in held.pop(0)]
            ending(engine, state)
            seen += [np.stack(list(rows)) for both in held for rows in both]
            wanted = wanted or seen
            assert all(np.array_equal(a, b) for a, b in zip(seen, wanted, strict=True)), late


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_rounds_of_few_rows(engines: Engines, facts: list[int], begun: list[int], rows: int) -> None:
    found = []
    for engine in engines:
        state, ids = standing(engine, facts[:30]), [facts[30]]
        for _ in range(5):
            ids += round_of(engine, state, ids[-1], GREEDY, rows)
        ids += round_of(engine, state, ids[-1], GREEDY, 6)  # other than was begun
        found.append((ids, state.digest()))
        ending(engine, state)
    assert found[0] == found[1] and len(begun) == 4


@pytest.mark.parametrize("rows", [1, 2, 6])
def test_what_is_to_be_run_next_is_found_as_the_host_finds_it(engines: Engines, rows: int) -> None:
    engine = engines[0]
    forward: Any = forward_of(engine)
    home = getattr(forward, "_sides", None) or getattr(forward, "_spans", None) or [forward]
    side = home[-1] if hasattr(forward, "_spans") else home[0]
    rng = random.Random(4)
    with engine._running(), side.running():
        draws, device = side.draws, side.device
        position = torch.tensor([70], dtype=torch.int32, device=device)
        drafted = torch.zeros(5, dtype=torch.int32, device=device)
        for _ in range(20):
            ids = [rng.choice((3, 4, 4, -1)) for _ in range(rows)]
            drafts = [rng.choice((3, 4, 4)) for _ in range(5)]
            draws._told[:rows] = torch.tensor(ids, dtype=torch.int32)
            drafted.copy_(torch.tensor(drafts, dtype=torch.int32))
            flight = Flight(
                draws=draws, logits=torch.empty(rows, 1, device="meta"), position=position,
                sent=next(draws._sent), events=(),
            )  # fmt: skip
            after = flight.after(drafted if rows > 1 else None).tolist()
            kept = rows_kept(drafts[: rows - 1], ids)
            assert after == [70 + kept, 0, 0, 0, max(ids[kept - 1], 0)], (ids, drafts)


Do = Callable[[DeviceEngine, DeviceState, int, list[int]], Any]


def other_token(engine: DeviceEngine, state: DeviceState, token: int, facts: list[int]) -> Any:
    return said(engine, state, (token + 1) % engine.vocab_size, 4)


def other_config(engine: DeviceEngine, state: DeviceState, token: int, facts: list[int]) -> Any:
    return said(engine, state, token, 3, GREEDY), said(engine, state, token, 3, CONFIGS[2])


def fork(engine: DeviceEngine, state: DeviceState, token: int, facts: list[int]) -> Any:
    snapshot = engine.capture(state)
    other = engine.restore(snapshot)
    snapshot.release()
    both = said(engine, other, token, 4), said(engine, state, token, 2)
    digest = other.digest()
    ending(engine, other)
    return both, digest


def snapshot(engine: DeviceEngine, state: DeviceState, token: int, facts: list[int]) -> Any:
    taken = engine.capture(state)
    arrays = {name: rows.tobytes() for name, rows in engine.dump(taken).items()}
    return arrays, said(engine, state, token, 3)


def restored(engine: DeviceEngine, state: DeviceState, token: int, facts: list[int]) -> Any:
    """Another state takes over, in caches that the first one had."""
    taken = engine.capture(state)
    engine.release(state)
    other = engine.restore(taken)
    found = said(engine, other, token, 5), other.digest()
    ending(engine, other)
    return found


def released(engine: DeviceEngine, state: DeviceState, token: int, facts: list[int]) -> Any:
    engine.release(state)
    other = standing(engine, facts[:30])
    found = said(engine, other, facts[30], 5), other.digest()
    ending(engine, other)
    return found


def prompted(engine: DeviceEngine, state: DeviceState, token: int, facts: list[int]) -> Any:
    return engine.prefill(state, [token, *facts[100:120]]).logits.tobytes()


def grown(engine: DeviceEngine, state: DeviceState, token: int, facts: list[int]) -> Any:
    return engine.prefill(state, [token, *facts[:80]]).logits.tobytes(), state.caches.positions


def rows_looked_at(engine: DeviceEngine, state: DeviceState, token: int, facts: list[int]) -> Any:
    rows = engine.forward_rows(state, [token, 7, 8])
    engine.commit(state, 2)
    return rows.tobytes()


def rows_drawn(engine: DeviceEngine, state: DeviceState, token: int, facts: list[int]) -> Any:
    found = engine.draw_rows(state, [token, 7, 8], HOT)
    engine.commit(state, 1)
    return found.ids, found.probs


def nothing_kept(engine: DeviceEngine, state: DeviceState, token: int, facts: list[int]) -> Any:
    """The row that was run is not committed, and its position gets another one."""
    found = engine.draw_rows(state, [token], HOT).ids
    engine.commit(state, 0)
    return found, said(engine, state, 9, 3)


def drafted(engine: DeviceEngine, state: DeviceState, token: int, facts: list[int]) -> Any:
    proposal = engine.draft(state, token, PlainChoice(config=GREEDY, first=state.pos + 1))
    return proposal.ids, proposal.conf_logits, said(engine, state, token, 2)


def round_played(engine: DeviceEngine, state: DeviceState, token: int, facts: list[int]) -> Any:
    proposal, found = engine.draft_and_draw(state, token, 6, drafts_by=HOT, config=HOT)
    engine.commit(state, 2)
    return proposal.ids, proposal.conf_logits, found.ids, found.probs


def interleaved(engine: DeviceEngine, state: DeviceState, token: int, facts: list[int]) -> Any:
    other, theirs, found = standing(engine, facts[:33]), facts[33], list[int]()
    for run in (1, 1, 1, 3, 2, 1):
        for _ in range(run):
            token = step(engine, state, token, HOT)
            found.append(token)
        for _ in range(run):
            theirs = step(engine, other, theirs, HOT)
            found.append(theirs)
    digest = other.digest()
    ending(engine, other)
    return found, digest


def cut_short(engine: DeviceEngine, state: DeviceState, token: int, facts: list[int]) -> Any:
    """A round of which less is kept than the device thought: a reply ends inside it, and the next message follows."""
    found = engine.draft_and_draw(state, token, 6, drafts_by=GREEDY, config=GREEDY)[1]
    engine.commit(state, 1)
    return found.ids, engine.prefill(state, facts[100:104]).logits.tobytes(), played(engine, state, facts[104], 3)


INSTEAD: tuple[Do, ...] = (
    other_token, other_config, fork, snapshot, restored, released, prompted, grown, rows_looked_at, rows_drawn,
    nothing_kept, drafted, round_played, interleaved, cut_short,
)  # fmt: skip
BEHIND_ROUNDS: tuple[Do, ...] = (fork, snapshot, restored, prompted, rows_drawn, drafted, round_played, cut_short)


@pytest.mark.parametrize(
    ("rounds", "do"),
    [
        *(pytest.param(False, do, id=do.__name__) for do in INSTEAD),
        *(pytest.param(True, do, id=f"{do.__name__} behind rounds") for do in BEHIND_ROUNDS),
    ],
)
def test_m26_what_was_begun_in_vain_leaves_no_trace(
    engines: Engines, facts: list[int], begun: list[int], rounds: bool, do: Do
) -> None:
    """Entries of ratio 4 end with what is begun."""
    found = []
    for engine in engines:
        state = standing(engine, facts[:40])
        ids = (played if rounds else said)(engine, state, facts[40], 3)
        told = do(engine, state, ids[-1], facts)
        end = None
        if not state.is_released:
            end = said(engine, state, 5, 4), state.digest()
        found.append((ids, told, end))
        ending(engine, state)
    assert found[0] == found[1]
    assert begun


def test_m26_any_calls_on_three_states(engines: Engines, facts: list[int], begun: list[int]) -> None:
    """The same calls by chance, most of them plain steps that follow each other."""
    found = []
    for engine in engines:
        found.append(list(_by_chance(engine, facts, random.Random(3))))
    for number, (ours, theirs) in enumerate(zip(*found, strict=True)):
        assert ours == theirs, number
    assert len(begun) > 8


def _by_chance(engine: DeviceEngine, facts: list[int], rng: random.Random) -> Iterator[Any]:
    states = [standing(engine, facts[: rng.randrange(5, 90)]) for _ in range(3)]
    tokens, kept, one = [7, 8, 9], list[DeviceSnapshot](), 0
    for number in range(50):
        one = rng.randrange(3) if number % 9 == 0 else one
        state, token, config = states[one], tokens[one], CONFIGS[0 if rng.random() < 0.02 else 1]
        chance = rng.random()
        if chance < 0.15:
            tokens[one] = round_of(engine, state, token, GREEDY)[-1]
            yield tokens[one]
        elif chance < 0.8:
            drawn = engine.draw_rows(state, [token], config)
            engine.commit(state, int(rng.random() < 0.95))
            tokens[one] = drawn.ids[0]
            yield drawn.ids
        elif chance < 0.84:
            rows = engine.forward_rows(state, [token, 3])
            engine.commit(state, rng.randrange(3))
            yield rows.tobytes()
        elif chance < 0.88:
            kept.append(engine.capture(state))
            yield {name: rows.tobytes() for name, rows in engine.dump(kept[-1]).items()}
        elif chance < 0.92 and kept:
            engine.release(state)
            states[one] = engine.restore(kept.pop(rng.randrange(len(kept))))
        elif chance < 0.96:
            yield engine.prefill(state, facts[: rng.randrange(1, 12)]).logits.tobytes()
        else:
            yield state.digest()
    for state in states:
        yield state.digest()
        engine.release(state)


def test_nothing_is_begun_past_the_end(engines: Engines, facts: list[int], begun: list[int]) -> None:
    engine = engines[0]
    state = standing(engine, facts[: MAX_SEQ - 4])
    said(engine, state, 9, 4)
    assert state.pos == MAX_SEQ and begun == [MAX_SEQ - 2, MAX_SEQ - 1]
    with pytest.raises(EngineError, match=f"pass max_seq {MAX_SEQ}"):
        engine.draw_rows(state, [9], HOT)
    ending(engine, state)


def test_tokens_that_are_given_begin_nothing(engines: Engines, facts: list[int], begun: list[int]) -> None:
    engine = engines[0]
    state = standing(engine, facts[:40])
    for token in (9, 10, 11, 12):
        assert step(engine, state, token, GREEDY) != token + 1
    assert begun == []
    ending(engine, state)


def test_the_host_sends_nothing_for_a_step_that_was_begun(
    engines: Engines, facts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sent = engines[0], list[int]()
    forward: Any = forward_of(engine)
    for side in getattr(forward, "_sides", None) or getattr(forward, "_spans", None) or [forward]:

        def noted(given: Any, tokens: Any, pos: int, send: Callable[..., None] = side._staging.send) -> None:
            sent.append(pos)
            send(given, tokens, pos)

        monkeypatch.setattr(side._staging, "send", noted)
    state = standing(engine, facts[:40])
    sent.clear()
    ids = said(engine, state, facts[40], 8)
    assert sorted(set(sent)) == [40, 41]
    said(engine, state, ids[-1] + 1, 1)
    assert sorted(set(sent)) == [40, 41, 48]
    ending(engine, state)


@pytest.mark.parametrize("place", [2, 5])
def test_an_interrupt_leaves_nothing_behind(
    engines: Engines, facts: list[int], monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    ids, digests = list[list[int]](), list[str]()
    for engine in engines:
        state = standing(engine, facts[:40])
        mine = said(engine, state, facts[40], place)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Flight, "land", _interrupted)
            engine.draw_rows(state, [mine[-1]], HOT)
        assert (state.pos, state.pending) == (40 + place, 0)
        mine += said(engine, state, mine[-1], 4)
        assert state.pos == 44 + place
        ids.append(mine)
        digests.append(state.digest())
        ending(engine, state)
        assert engine._ahead._moves == []
    assert ids[0] == ids[1] and digests[0] == digests[1]


def _interrupted(flight: Flight) -> Verified:
    raise KeyboardInterrupt


@pytest.mark.parametrize("ends", ["release", "new_state", "close"])
def test_whoever_frees_caches_waits_for_what_was_begun(engines: Engines, facts: list[int], ends: str) -> None:
    engine = engines[0]
    if ends == "close":
        engine = DeviceEngine(
            engine.ranks, engine.config, engine.contract, max_seq=MAX_SEQ, prefill="exact", links=engine.links
        )
    state = standing(engine, facts[:40])
    said(engine, state, facts[40], 3)
    (move,) = engine._ahead._moves
    {"release": lambda: engine.release(state), "new_state": engine.new_state, "close": engine.close}[ends]()
    assert engine._ahead._moves == [] and all(event.query() for event in move.flight.events)
    if ends == "new_state":
        ending(engine, state)


def test_a_state_that_is_forgotten_is_not_held(engines: Engines, facts: list[int]) -> None:
    engine = engines[0]
    before = engine.blocks_in_use
    state = standing(engine, facts[:40])
    said(engine, state, facts[40], 3)
    del state
    assert engine.blocks_in_use == before
    other = standing(engine, facts[:10])
    ending(engine, other)


@pytest.mark.parametrize("engines", PAIRS, indirect=True)
def test_an_error_of_a_step_that_was_begun_is_told_to_whoever_takes_it(
    engines: Engines, facts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = engines
    theirs = standing(other, facts[:40])
    wanted = said(other, theirs, facts[40], 8)
    state, forward = standing(engine, facts[:40]), forward_of(engine)
    assert isinstance(forward, PairForward)
    ids = said(engine, state, facts[40], 2)
    with monkeypatch.context() as patch:
        _fail_ahead(forward, patch)
        ids += said(engine, state, ids[-1], 1)  # the step behind it fails
    with pytest.raises(EngineError, match="lost each other"):
        engine.draw_rows(state, [ids[-1]], HOT)
    assert (state.pos, state.pending) == (43, 0)
    assert not any(link.has_failed or link.mine.counts.any() or link.mine.words.any() for link in forward._links)
    ids += said(engine, state, ids[-1], 5)
    assert ids == wanted and state.digest() == theirs.digest()
    ending(engine, state)
    ending(other, theirs)


@pytest.mark.parametrize("engines", PAIRS, indirect=True)
def test_an_error_of_a_step_that_was_forgotten_is_told_once(
    engines: Engines, facts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = engines
    theirs, state, forward = standing(other, facts[:40]), standing(engine, facts[:40]), forward_of(engine)
    assert isinstance(forward, PairForward)
    ids = said(engine, state, facts[40], 2)
    with monkeypatch.context() as patch:
        _fail_ahead(forward, patch)
        ids += said(engine, state, ids[-1], 1)
    taken = engine.capture(state)  # nothing of it is in what was committed
    with pytest.raises(EngineError, match="lost each other"):
        engine.forward_rows(state, [9])
    assert (state.pos, state.pending) == (43, 0)
    again = engine.restore(taken)
    assert ids == said(other, theirs, facts[40], 3)
    assert said(engine, state, 9, 4) == said(engine, again, 9, 4) == said(other, theirs, 9, 4)
    assert state.digest() == again.digest() == theirs.digest()
    ending(engine, state, again)
    ending(other, theirs)


def _fail_ahead(forward: PairForward, patch: pytest.MonkeyPatch) -> None:
    """Let a join of every step that is begun ahead wait in vain, as far as anybody can tell."""
    chosen, go_on = forward._chosen, forward.go_on

    def failing(*args: Any) -> Flight:
        with torch.inference_mode():
            forward._links[1].mine.error[0] = 1
            forward._links[0].mine.counts[:] += 1  # the other GPU went on
        return chosen(*args)

    def begin(*args: Any) -> Flight:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(forward, "_chosen", failing)
            return go_on(*args)

    patch.setattr(forward, "go_on", begin)
