"""What the caches take on each device, by class, as the allocator has it; any thread may ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

CLASSES = ("window", "compressor", "indexer", "source", "drafter")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassBytes:
    """One class of cache, in bytes.

    Attributes:
        used: held by states and snapshots, what they share counted once.
        reserved: taken from the device; what is not used is filled before more is taken.
    """

    used: int
    reserved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """The caches on one device.

    Attributes:
        classes: by name, those of `Engine.state_bytes`; and of a GPU "prefill", what prompts are read in chunks with,
            and "forward", the angles of all positions and what kernels hand on: no state holds these, so they are
            reserved and not used.
    """

    device: str
    classes: dict[str, ClassBytes]

    @property
    def used(self) -> int:
        return sum(part.used for part in self.classes.values())

    @property
    def reserved(self) -> int:
        return sum(part.reserved for part in self.classes.values())


@runtime_checkable
class Counted(Protocol):
    """An engine that tells what its caches take."""

    def cache_bytes(self) -> tuple[DeviceBytes, ...]:
        """Return what the caches take on each device, at this moment."""
        ...


@runtime_checkable
class Roomy(Protocol):
    """An engine that knows what its devices have free."""

    def largest_session(self) -> int:
        """Return the most positions, at most `max_seq`, that one more state can have at this moment."""
        ...
