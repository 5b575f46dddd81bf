"""What a first chat would wait for, done while a model is loaded: kernels are compiled, graphs captured, joins tried.

A short sequence of its own goes once along every way that a request takes. Its caches go back to the engine's shelf as
new ones are, zeros everywhere, and keep their graphs. What depends on how long a chat gets stays: a graph of each width
for every extent beyond the first, of which no kernel is compiled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dsv4nb.config import SamplerConfig
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.device_state import DeviceState
from dsv4nb.engine.extent import FEWEST, extents
from dsv4nb.engine.plain_choice import GREEDY, PlainChoice
from dsv4nb.engine.prefill import FEW_ROWS, FEWEST_ROWS, padded_rows
from dsv4nb.engine.protocol import MAX_ROWS, Row
from dsv4nb.engine.speculate import run_rows

# the first aligned, then of rows that no power of two divides, then of some: kernels may tell them apart
PROMPTS = (64, FEWEST_ROWS + 1, FEWEST_ROWS + 8)
FOLLOWING = 3  # plain steps that follow each other: behind the second one the next is begun ahead, the third takes it
LEFT = 64  # positions behind the last prompt: of drafts, verify forwards and the rows of a drafter's block

# a draw launches what its sampler needs: that is all there is
SAMPLERS = (
    GREEDY,
    SamplerConfig(temperature=1.0, top_p=1.0, top_k=0),
    SamplerConfig(temperature=1.0, top_p=1.0, top_k=20),
    SamplerConfig(temperature=1.0, top_p=0.9, top_k=0),
    SamplerConfig(temperature=1.0, top_p=0.9, top_k=20),
)


def is_of_use(engine: DeviceEngine) -> bool:
    """Whether a first request waits for anything: on a CPU nothing is compiled or captured."""
    return any(weights.device.type == "cuda" for weights in engine.ranks)


def warm_up(engine: DeviceEngine, on_step: Callable[[], None] = lambda: None) -> None:
    """Run everything once, on the thread that runs the engine; nothing of it is left but what is faster now.

    Args:
        on_step: called between two forwards; what it raises ends it.

    Raises:
        EngineError: a forward failed; so would a request's.
        MemoryError: there is no room for a sequence.
    """
    state = engine.new_state()
    try:
        for _ in _forwards(engine, state):
            on_step()
        for positions in extents(engine.max_seq):
            engine.compile(state, positions)
            on_step()
        snapshot = engine.capture(state)
        engine.release(state)  # the caches that it was in, with their graphs, are those of the next state
        state = engine.restore(snapshot)
        snapshot.release()
        _run(engine, state, 1, GREEDY)
        engine.blank(state)
    finally:
        engine.release(state)
    state = engine.new_state()
    try:
        for _ in _far_forwards(engine, state):
            on_step()
        engine.blank(state)
    finally:
        engine.release(state)


def _forwards(engine: DeviceEngine, state: DeviceState) -> Iterator[None]:
    """Run a forward between two steps."""
    yield from _shapes(engine, state)
    for rows in PROMPTS:
        yield from _prompt(engine, state, rows)
    for rows in _decode_rows(state.pos):
        yield from _prompt(engine, state, rows)
    longest = min(engine.chunk_rows, min(FEWEST, engine.max_seq) - state.pos - LEFT)  # that stays in the first extent
    if longest >= FEWEST_ROWS:
        yield from _prompt(engine, state, longest)
    widths = range(1, min(MAX_ROWS, engine.block_size + 1) + 1)
    if not 0 < state.pos <= engine.max_seq - len(widths) - FOLLOWING:
        return  # nor is there room for a chat
    for config in SAMPLERS:
        yield from _drawn(engine, state, config, widths)
    if engine.block_size:
        engine.draft(state, 0, _best)
        yield
    token = 0
    for _ in range(FOLLOWING):
        token = max(_step(engine, state, token), 0)
        yield
    engine.forward_rows(state, [0])


def _far_forwards(engine: DeviceEngine, state: DeviceState) -> Iterator[None]:
    """Run likewise what runs where entries are chosen, behind the first extent: there the caches hold zeros."""
    widths = range(1, min(MAX_ROWS, engine.block_size + 1) + 1)
    if engine.max_seq < FEWEST + sum(PROMPTS) + MAX_ROWS * MAX_ROWS + LEFT:
        return
    state.pos = state.context = FEWEST
    for rows in PROMPTS:
        yield from _prompt(engine, state, rows)
    for rows in _decode_rows(state.pos):
        yield from _prompt(engine, state, rows)
    yield from _drawn(engine, state, GREEDY, widths)


def _drawn(engine: DeviceEngine, state: DeviceState, config: SamplerConfig, widths: range) -> Iterator[None]:
    """Run what chooses by a sampler: a block of drafts, a round, and rows of every width."""
    if engine.block_size:
        engine.draft(state, 0, PlainChoice(config=config, first=state.pos + 1))
        yield
        engine.draft_and_draw(state, 0, len(widths), drafts_by=config, config=config)
        yield
    for width in widths:
        _run(engine, state, width, config)
        yield


def _shapes(engine: DeviceEngine, state: DeviceState) -> Iterator[None]:
    """Run chunks as they are launched: of padded rows twice, for a graph; at the end of caches there is no room to pad.

    All stand where they could, and the sequence stands at its begin again behind them.
    """
    if not engine.chunk_rows:
        return
    padded = {padded_rows(rows) for rows in range(1, FEW_ROWS + 1)}
    at_begin = [rows for rows in sorted(padded) if rows <= min(engine.chunk_rows, state.caches.positions)]
    at_end = [rows for rows in PROMPTS[1:] if rows < state.caches.positions]
    for rows, pos in [(rows, 0) for rows in at_begin * 2] + [(rows, state.caches.positions - rows) for rows in at_end]:
        state.pos = state.context = pos
        engine.prefill(state, _tokens(engine, rows))
        yield
    state.pos = state.context = 0


def _prompt(engine: DeviceEngine, state: DeviceState, rows: int) -> Iterator[None]:
    if state.pos + rows + LEFT <= engine.max_seq:
        engine.prefill(state, _tokens(engine, rows))
        yield


def _decode_rows(pos: int) -> Iterator[int]:
    """Yield prompts that follow each other from `pos` on and end in decode rows: first without a head, then with one.

    The pieces of either kind have 1 … MAX_ROWS rows, since the first ends at a multiple of MAX_ROWS.
    """
    if before := (MAX_ROWS - 1 - pos) % MAX_ROWS:
        yield before
    for first in range(1, MAX_ROWS):
        yield first + (MAX_ROWS - 1 - first or MAX_ROWS)
    yield MAX_ROWS + MAX_ROWS - 1


def _tokens(engine: DeviceEngine, rows: int) -> list[int]:
    """Return ids that are spread over the vocabulary, as those of a text are over experts."""
    return [(7919 * i + 11) % engine.vocab_size for i in range(rows)]


def _run(engine: DeviceEngine, state: DeviceState, width: int, config: SamplerConfig) -> None:
    _ = run_rows(engine, state, _tokens(engine, width), config).rows[0]  # looked at, it comes to the host


def _step(engine: DeviceEngine, state: DeviceState, token: int) -> int:
    """Commit a token; return what comes behind it, -1 where the host is to say."""
    found = run_rows(engine, state, [token], GREEDY).token(0)
    engine.commit(state, 1)
    return -1 if found is None else found


def _best(row: Row, slot: int, ahead: Sequence[int]) -> int:
    return int(row.argmax())
