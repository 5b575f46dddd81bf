"""Named places where a forward can be watched or changed; absent when unused.

An engine that can be watched runs its forwards under `Taps` while `tapped` says so. A forward that nobody watches
asks `is None` a few times per layer. What a tap leaves alone keeps its bits.

Places, each one row per position:

    embed                     [HC, D]  the residual streams in front of layer 0
    layers.N.attention.in     [D]      what the attention of layer N reads, collapsed and normalised
    layers.N.attention.out    [D]      what it adds
    layers.N.middle           [HC, D]  the streams between attention and experts
    layers.N.experts.in       [D]      what router and experts read
    layers.N.experts.out      [D]      what they add, the shared expert included
    layers.N.out              [HC, D]  the streams behind the layer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine.batch import Batch
from dsv4nb.errors import Dsv4Error, RequestError

EMBED = "embed"
LAYER_PLACES = ("attention.in", "attention.out", "middle", "experts.in", "experts.out", "out")

See = Callable[[Tensor, Tensor], Tensor | None]
"""Sees (values [n, ...], their positions [n]) and returns what stands in their place; None leaves them alone."""


def tap_names(n_layers: int) -> tuple[str, ...]:
    """Return the places of a model, in the order in which a forward comes by."""
    return (EMBED, *(f"layers.{layer}.{place}" for layer in range(n_layers) for place in LAYER_PLACES))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tap:
    """Somebody at a place.

    Attributes:
        place: one of `tap_names`.
        see: called once per forward that has such rows, on the engine's thread; the values are the callee's own.
        positions: which rows it sees, ascending; None is all.
    """

    place: str
    see: See
    positions: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reads:
    """What rows of one layer attended to. The masses of a row and head sum to 1.

    Attributes:
        positions: [n] of the rows.
        window: [n, H, W] mass by key/value row; column c of the row at p is position p - W + 1 + c.
        sink: [n, H] mass that went nowhere.
        entries: [n, S] numbers of the entries read, ascending; `ops.ABSENT`, -1, stands for none.
        mass: [n, H, S] of these.
        scores: [n, S] what the indexer says of these; None where there is no indexer.
    """

    layer: int
    positions: Tensor
    window: Tensor
    sink: Tensor
    entries: Tensor
    mass: Tensor
    scores: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """Which experts rows of one layer visited.

    Attributes:
        positions: [n] of the rows.
        experts: [n, K] ascending; weights: [n, K] as they enter the sum.
    """

    layer: int
    positions: Tensor
    experts: Tensor
    weights: Tensor


class Taps:
    """Everybody who watches a run.

    Args:
        taps: at one place in this order, each seeing what the one before made of the values.
        on_reads, on_routes: called once per forward and layer that has such rows.
        layers, positions: of `on_reads` and `on_routes`; None is all.
    """

    def __init__(
        self,
        taps: Iterable[Tap] = (),
        *,
        on_reads: Callable[[Reads], None] | None = None,
        on_routes: Callable[[Routes], None] | None = None,
        layers: frozenset[int] | None = None,
        positions: Tensor | None = None,
    ) -> None:
        self.by_place: dict[str, list[Tap]] = {}
        for tap in taps:
            self.by_place.setdefault(tap.place, []).append(tap)
        self.on_reads, self.on_routes = on_reads, on_routes
        self.layers, self.positions = layers, positions


@runtime_checkable
class Watchable(Protocol):
    """An engine whose forwards can be watched."""

    @property
    def config(self) -> ModelConfig: ...

    def tapped(self, taps: Taps) -> AbstractContextManager[None]:
        """Run the forwards inside under `taps` alone; what was before counts again behind it.

        Raises:
            RequestError: inside, when a tap fails or returns what cannot stand there.
        """
        ...

    def read_out(self, streams: Tensor, positions: Tensor) -> Tensor:
        """Return the logits [n, V] that residual streams [n, HC, D] would give behind the last layer.

        Of the last layer's they are the bits of a forward.

        Args:
            positions: [n] of the rows, ascending.
        """
        ...


class Watch:
    """The taps of one layer in one forward."""

    def __init__(self, taps: Taps, batch: Batch, layer: int | None = None) -> None:
        self._taps, self._batch, self._layer = taps, batch, layer

    def of(self, layer: int) -> Watch:
        """Return the taps of a layer."""
        return Watch(self._taps, self._batch, layer)

    def at(self, place: str, values: Tensor) -> Tensor:
        """Show values [places, ...] to those who are there, and return what they made of them."""
        name = place if self._layer is None else f"layers.{self._layer}.{place}"
        for tap in self._taps.by_place.get(name, ()):
            rows = _rows(self._batch, tap.positions)
            if rows.numel():
                made = _seen(tap, values[self._batch.live][rows], self._batch.positions[rows])
                if made is not None:
                    values = values.clone()
                    values[self._batch.live.start + rows] = made
        return values

    def wants_reads(self) -> bool:
        """Whether somebody wants to know what rows of this forward read."""
        return self._taps.on_reads is not None and self._is_wanted()

    def reads(
        self, query: Tensor, keys: Sequence[tuple[Tensor, Tensor]], sink: Tensor, entries: Tensor, scores: Tensor | None
    ) -> None:
        """Tell what the rows attended to.

        Args:
            query: [T, H, hd]; keys: as of `ops.sparse_attention`, the window first.
            entries: [T, S] numbers of the others, S at least as many as `keys` have.
            scores: [T, C] by number.
        """
        assert self._taps.on_reads is not None and self._layer is not None
        rows = _rows(self._batch, self._taps.positions)
        width = keys[0][0].shape[1]
        mass, rest = attention_mass(query[rows], [(k[rows], hidden[rows]) for k, hidden in keys], sink)
        picked = entries[rows]
        told = None
        if scores is not None:
            told = scores[rows].gather(1, picked.clamp_min(0)) if picked.shape[1] else scores.new_empty(len(rows), 0)
        self._taps.on_reads(
            Reads(
                layer=self._layer,
                positions=self._batch.positions[rows],
                window=mass[..., :width],
                sink=rest,
                entries=picked,
                mass=mass[..., width : width + picked.shape[1]],
                scores=told,
            )
        )

    def routes(self, experts: Tensor, weights: Tensor) -> None:
        """Tell where the live rows went: [T, K] and [T, K]."""
        if self._taps.on_routes is not None and self._is_wanted():
            assert self._layer is not None
            rows = _rows(self._batch, self._taps.positions)
            self._taps.on_routes(
                Routes(
                    layer=self._layer,
                    positions=self._batch.positions[rows],
                    experts=experts[rows],
                    weights=weights[rows],
                )
            )

    def _is_wanted(self) -> bool:
        layers = self._taps.layers
        return (layers is None or self._layer in layers) and bool(_rows(self._batch, self._taps.positions).numel())


def tapped(engine: object, taps: Taps | None) -> AbstractContextManager[None]:
    """Run the forwards of `engine` under `taps`; as they are when there are none."""
    if taps is None:
        return nullcontext()
    assert isinstance(engine, Watchable), engine
    return engine.tapped(taps)


def seen(watch: Watch | None, place: str, values: Tensor) -> Tensor:
    """Return `values`, or what those who watch this place made of them."""
    return values if watch is None else watch.at(place, values)


def attention_mass(query: Tensor, keys: Sequence[tuple[Tensor, Tensor]], sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of `ops.sparse_attention`: of the keys [T, H, ΣS], side by side, and of the sink [T, H]."""
    scale = query.shape[-1] ** -0.5
    logits = torch.cat(
        [(torch.bmm(query, k.mT) * scale).masked_fill_(hidden[:, None], -math.inf) for k, hidden in keys], -1
    )
    top = logits.amax(-1, keepdim=True)
    raised, rest = (logits - top).exp(), (sink[:, None] - top).exp()
    total = raised.sum(-1, keepdim=True) + rest
    return raised / total, (rest / total)[..., 0]


def _rows(batch: Batch, positions: Tensor | None) -> Tensor:
    """Return which live rows stand at `positions`."""
    if positions is None:
        return torch.arange(len(batch.positions))
    return torch.isin(batch.positions, positions).nonzero()[:, 0]


def _seen(tap: Tap, values: Tensor, positions: Tensor) -> Tensor | None:
    try:
        made = tap.see(values, positions)
    except Dsv4Error:
        raise
    except Exception as error:
        raise RequestError(f"the tap at {tap.place} failed: {type(error).__name__}: {error}", param="change") from error
    if made is None:
        return None
    if not isinstance(made, Tensor) or made.shape != values.shape or made.dtype != values.dtype:
        is_tensor = isinstance(made, Tensor)
        found = f"{made.dtype} {list(made.shape)}" if is_tensor else type(made).__name__
        raise RequestError(
            f"the tap at {tap.place} returned {found}; what it was given is {values.dtype} {list(values.shape)}, "
            "and so must be what it returns, or None",
            param="change",
        )
    if not bool(made.isfinite().all()):
        raise RequestError(f"the tap at {tap.place} returned values that are not finite", param="change")
    return made
