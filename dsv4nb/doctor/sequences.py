"""What the engine's checks run: text of a notebook's kind, as ids, and states that are released at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from dsv4nb.doctor.differences import Arrays
from dsv4nb.engine.protocol import DecodeState, Engine, Row, Snapshot
from dsv4nb.handle import Model

_TEXT = (
    "The quick brown fox went to Rome on Monday. There were 3 golden keys in her bag, and 63 - 27 is 36. "
    "for i in range(10):\n    print(i * i)\nWhy is the sky blue? Because air scatters short waves more than long ones. "
    "Tom has a red kite; Anna sang, and the river ran on to Berlin.\n"
)


def text_ids(model: Model, n: int) -> list[int]:
    """Return `n` ids of ordinary text."""
    ids = model.encode(_TEXT)
    return (ids * (n // len(ids) + 1))[:n]


class Held:
    """Makes states and snapshots of one engine that are released together."""

    def __init__(self, engine: Engine, stack: ExitStack) -> None:
        self._engine, self._stack = engine, stack

    def state(self, ids: Sequence[int]) -> DecodeState:
        """Make a state behind `ids`."""
        state = self._engine.new_state()
        self._stack.callback(self._engine.release, state)
        self._engine.prefill(state, ids)
        return state

    def row(self, ids: Sequence[int]) -> Row:
        """Return the logits [V] behind `ids`."""
        state = self._engine.new_state()
        self._stack.callback(self._engine.release, state)
        return self._engine.prefill(state, ids).logits

    def snapshot(self, state: DecodeState) -> Snapshot:
        """Capture a state."""
        snapshot = self._engine.capture(state)
        self._stack.callback(snapshot.release)
        return snapshot

    def restored(self, snapshot: Snapshot) -> DecodeState:
        """Make a state at a snapshot."""
        state = self._engine.restore(snapshot)
        self._stack.callback(self._engine.release, state)
        return state

    def caches(self, state: DecodeState) -> Arrays:
        """Return everything that a later position of a state can see, by name."""
        return self._engine.dump(self.snapshot(state))


@contextmanager
def held(engine: Engine) -> Iterator[Held]:
    """Release on leaving what was made meanwhile."""
    with ExitStack() as stack:
        yield Held(engine, stack)
