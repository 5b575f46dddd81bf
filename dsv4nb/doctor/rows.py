"""What verify rounds stand on: a row is the same in any batch, and rejected rows leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from dsv4nb.doctor import differences
from dsv4nb.doctor.plan import Compared, Comparison, Plan, Skip, on_engine
from dsv4nb.doctor.sequences import held, text_ids
from dsv4nb.engine.protocol import Engine
from dsv4nb.handle import Model

WIDTH = 6  # the pending token and five drafts

# where the first row stands: the blocks of 4 and of 128 positions, the window and the tiles of 8 are entered, crossed
# and left; what is near a border of several comes first
_POSITIONS = (125, 3, 127, 62, 124, 8, 128, 1, 126, 64, 123, 255)


def _positions(model: Model, rows: int) -> list[int]:
    fitting = [position for position in _POSITIONS if position + rows <= model.engine.max_seq]
    if not fitting:
        raise Skip(f"max_seq {model.engine.max_seq} has no room for {rows} rows behind a prompt")
    return fitting


def _batch_against_single(ids: Sequence[int], position: int, engine: Engine, go_on: Callable[[], None]) -> Compared:
    counts = {"position": 1, "row": WIDTH}
    tokens = ids[position : position + WIDTH]
    with held(engine) as made:
        state = made.state(ids[:position])
        alone = made.restored(made.snapshot(state))
        rows = engine.forward_rows(state, tokens)
        for i, token in enumerate(tokens):
            go_on()
            row = engine.forward_rows(alone, (token,))[0]
            engine.commit(alone, 1)
            if difference := differences.of_rows(rows[i], row):
                where = f"position {position + i}, row {i + 1} of {WIDTH}"
                return Compared(counts=counts, difference=f"{where}: {difference}")
    return Compared(counts=counts)


def _rejected(ids: Sequence[int], position: int, accepted: int, engine: Engine, go_on: Callable[[], None]) -> Compared:
    """Reject rows, go on, and compare with a state that never had them."""
    counts = {"rejection": 1, "rejected row": WIDTH - accepted}
    kept, later = ids[position : position + accepted], ids[position + accepted : position + accepted + WIDTH]
    wrong = [(token + 1) % engine.vocab_size for token in ids[position + accepted : position + WIDTH]]
    where = f"position {position}, {accepted} of {WIDTH} rows accepted"
    with held(engine) as made:
        state = made.state(ids[:position])
        other = made.restored(made.snapshot(state))
        engine.forward_rows(state, [*kept, *wrong])
        engine.commit(state, accepted)
        go_on()
        if kept:
            engine.forward_rows(other, kept)
            engine.commit(other, accepted)
        if difference := differences.of_caches(made.caches(state), made.caches(other)):
            return Compared(counts=counts, difference=f"{where}: {difference}")
        go_on()
        rows, expected = engine.forward_rows(state, later), engine.forward_rows(other, later)
        for i in range(WIDTH):
            if difference := differences.of_rows(rows[i], expected[i]):
                return Compared(counts=counts, difference=f"{where}, row {i + 1} behind them: {difference}")
        engine.commit(state, WIDTH)
        engine.commit(other, WIDTH)
        if difference := differences.of_caches(made.caches(state), made.caches(other)):
            return Compared(counts=counts, difference=f"{where}, {WIDTH} rows later: {difference}")
    return Compared(counts=counts)


def _batches(model: Model) -> list[Comparison]:
    positions = _positions(model, WIDTH)
    ids = text_ids(model, max(positions) + WIDTH)
    return [partial(on_engine, model, partial(_batch_against_single, ids, position)) for position in positions]


def _rejections(model: Model) -> list[Comparison]:
    positions = _positions(model, 2 * WIDTH)
    ids = text_ids(model, max(positions) + 2 * WIDTH)
    return [
        partial(on_engine, model, partial(_rejected, ids, position, (i + 2) % WIDTH))
        for i, position in enumerate(positions)
    ]


BATCHES = Plan(
    name="batch rows",
    told=f"{WIDTH} rows at once against one at a time, every bit of the logits",
    weight=2,
    comparisons=_batches,
)
REJECTIONS = Plan(
    name="rollback",
    told=f"a state that rejected rows of {WIDTH} against one that never had them, every bit of caches and logits",
    weight=3,
    comparisons=_rejections,
)
