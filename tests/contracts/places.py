"""What a turn calls on its way, and how one of these calls is made to fail. For scripts of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from dsv4nb.engine import attention, blocks, layer
from dsv4nb.engine.blocks import BlockTable
from dsv4nb.engine.drafter import Drafter
from dsv4nb.engine.rings import DraftRings
from dsv4nb.engine.snapshot import CpuSnapshot
from dsv4nb.engine.state import CpuState, LayerCache
from dsv4nb.model import Model

When = Literal["before", "after"]  # the call did anything; it did all
Fault = Literal["error", "memory", "torch", "interrupt", "cancel"]

EVERY: tuple[Fault, ...] = ("error", "memory", "interrupt", "cancel")
# what torch says on a CPU; the engine makes a MemoryError of it
NO_MEMORY = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


class Broken(RuntimeError):
    """What a place raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Something that a turn calls.

    Attributes:
        of: of which objects, classes or modules which attributes are wrapped.
        faults: the ways in which it can fail.
    """

    of: Callable[[Model], list[tuple[Any, str]]]
    faults: tuple[Fault, ...] = EVERY
    whens: tuple[When, ...] = ("before", "after")


def _engine(name: str, **how: Any) -> Place:
    return Place(of=lambda model: [(model.engine, name)], **how)


def _forward(*names: str, **how: Any) -> Place:
    return Place(of=lambda model: [(model.engine._forward, name) for name in names], **how)  # type: ignore[attr-defined]


def _all(owner: Any, name: str, **how: Any) -> Place:
    return Place(of=lambda model: [(owner, name)], **how)


def _prefixes(name: str, **how: Any) -> Place:
    return Place(of=lambda model: [(model.cache, name)], **how)


ROOM: dict[str, Any] = {"faults": ("memory", "torch"), "whens": ("before",)}

PLACES: dict[str, Place] = {
    "a chunk": _forward("fill", "last_row"),
    "layer k": _forward("_layer"),
    "layer k, rings written, entries not": _all(attention, "pool_entries"),
    "layer k, caches written, experts not": _all(layer, "mix_experts"),
    "block k of the drafter": _all(Drafter, "_attend"),
    "rings of the drafter": _all(DraftRings, "catch_up"),
    "a draft": _engine("draft"),
    "prefill": _engine("prefill"),
    "a decode row": _engine("forward_rows"),
    "commit": _engine("commit"),  # after it: committed, and not in the ledger
    "commit of a chunk": _all(CpuState, "commit"),
    "new_state": _engine("new_state"),
    "capture": _engine("capture"),
    "restore": _engine("restore"),
    "load": _engine("load"),
    "dump": _engine("dump"),
    "release of a state": _engine("release"),
    "release of a snapshot": _all(CpuSnapshot, "release"),
    "growth of blocks": _all(blocks, "new_rows", **ROOM),
    "rings of a state": _all(LayerCache, "__init__", **ROOM),
    "sharing of blocks": _all(BlockTable, "adopt"),
    "start chosen": _prefixes("decide"),
    "start made": _prefixes("resume"),
    "mark": _prefixes("mark"),
    "kept": _prefixes("commit"),  # after it: kept, and not in the ledger of the chat
}


class Gate:
    """Counts the calls of a place, and lets the one at index `at` fail."""

    def __init__(self, at: int = -1, when: When = "before", fault: Fault = "error") -> None:
        self.at, self.when, self.fault = at, when, fault
        self.calls, self.is_hit = 0, False
        self.cancel: Callable[[], None] = lambda: None

    def around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return `real` behind the gate."""

        def gated(*args: Any, **kwargs: Any) -> Any:
            number, self.calls = self.calls, self.calls + 1
            if number == self.at and self.when == "before":
                self._fail()
            result = real(*args, **kwargs)
            if number == self.at and self.when == "after":
                self._fail()
            return result

        return gated

    def _fail(self) -> None:
        self.is_hit = True
        if self.fault == "cancel":
            self.cancel()
        elif self.fault == "interrupt":
            raise KeyboardInterrupt
        elif self.fault == "memory":
            raise MemoryError
        elif self.fault == "torch":
            raise RuntimeError(NO_MEMORY)
        else:
            raise Broken("broken on purpose")


@contextmanager
def gated(place: Place, model: Model, gate: Gate) -> Iterator[None]:
    """Put a gate before a place."""
    journals = model._parts.server._open

    def cancel() -> None:
        for journal in list(journals):
            journal.cancel()

    gate.cancel = cancel
    with ExitStack() as undo:
        for owner, name in place.of(model):
            own = vars(owner).get(name)
            setattr(owner, name, gate.around(getattr(owner, name) if own is None else own))
            if own is None:
                undo.callback(delattr, owner, name)
            else:
                undo.callback(setattr, owner, name, own)
        yield
