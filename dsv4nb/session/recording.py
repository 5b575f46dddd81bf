"""What is kept of a run that is watched: the sizes of the arrays beforehand, and who fills them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine.taps import Reads, Routes, Tap, Taps, Watchable
from dsv4nb.session.inspection import ABSENT, Inspection, Ints, LayerReads, Routing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What is to be kept of a run.

    Attributes:
        tokens: [n] positions, ascending.
        keep: names of places.
    """

    ids: tuple[int, ...]
    tokens: Ints
    layers: tuple[int, ...]
    per_head: bool
    keep: tuple[str, ...]
    attention: bool
    logits: bool
    lens: bool
    config: ModelConfig = field(repr=False)

    def shapes(self) -> dict[str, tuple[type[np.generic], tuple[int, ...]]]:
        """Return dtype and shape of every array, by name."""
        config, n = self.config, len(self.tokens)
        h = config.num_attention_heads if self.per_head else 1
        wide, k = (config.hc_mult, config.hidden_size), config.num_experts_per_tok
        out: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
            "experts": (np.int64, (len(self.layers), n, k)),
            "weights": (np.float32, (len(self.layers), n, k)),
        }
        for layer in self.layers if self.attention else ():
            s = self.entries(layer)
            out[f"{layer}.window"] = np.float32, (n, h, config.sliding_window)
            out[f"{layer}.sink"] = np.float32, (n, h)
            out[f"{layer}.entries"] = np.int64, (n, s)
            out[f"{layer}.mass"] = np.float32, (n, h, s)
            if config.kind(layer) == "csa":
                out[f"{layer}.scores"] = np.float32, (n, s)
        for place in self.keep:
            is_narrow = ".attention." in place or ".experts." in place
            out[place] = np.float32, (n, *(wide[1:] if is_narrow else wide))
        if self.logits:
            out["logits"] = np.float32, (n, config.vocab_size)
        if self.lens:
            out["lens"] = np.float32, (len(self.layers), n, config.vocab_size)
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in self.shapes().values())

    def entries(self, layer: int) -> int:
        """Return the most entries that a watched token can read in a layer."""
        ratio, kind = self.config.compress_ratios[layer], self.config.kind(layer)
        if kind == "swa":
            return 0
        most = (int(self.tokens[-1]) + 1) // ratio
        return min(most, self.config.index_topk) if kind == "csa" else most


class Recorder:
    """Writes down what a run tells of itself, into arrays of a known size."""

    def __init__(self, plan: Plan, engine: Watchable) -> None:
        self._plan, self._engine = plan, engine
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        for name, (dtype, shape) in plan.shapes().items():
            empty = ABSENT if dtype is np.int64 else 0
            self._arrays[name] = np.full(shape, empty, dtype)

    def taps(self, others: Sequence[Tap]) -> Taps:
        """Return the taps of a run: what others change is seen as they leave it."""
        plan, at = self._plan, torch.from_numpy(self._plan.tokens)
        own = [Tap(place=place, see=partial(self._keep, place), positions=at) for place in plan.keep]
        last = plan.config.num_hidden_layers - 1
        if plan.logits:
            own.append(Tap(place=f"layers.{last}.out", see=partial(self._read_out, "logits", ...), positions=at))
        for i, layer in enumerate(plan.layers if plan.lens else ()):
            own.append(Tap(place=f"layers.{layer}.out", see=partial(self._read_out, "lens", i), positions=at))
        return Taps(
            [*others, *own],
            on_reads=self._reads if plan.attention else None,
            on_routes=self._routes,
            layers=frozenset(plan.layers),
            positions=at,
        )

    def inspection(self, model: str, pieces: tuple[bytes, ...], changed: tuple[str, ...]) -> Inspection:
        """Return what was written down."""
        plan, arrays, config = self._plan, self._arrays, self._plan.config
        attention = {
            layer: LayerReads(
                layer=layer,
                kind=config.kind(layer),
                ratio=config.compress_ratios[layer],
                window=arrays[f"{layer}.window"],
                sink=arrays[f"{layer}.sink"],
                entries=arrays[f"{layer}.entries"],
                mass=arrays[f"{layer}.mass"],
                scores=arrays.get(f"{layer}.scores"),
            )
            for layer in plan.layers
            if plan.attention
        }
        routing = Routing(
            layers=plan.layers,
            tokens=plan.tokens,
            experts=arrays["experts"],
            weights=arrays["weights"],
            hashed=tuple(map(config.is_hashed, plan.layers)),
            n_experts=config.n_routed_experts,
        )
        return Inspection(
            model=model,
            ids=plan.ids,
            pieces=pieces,
            tokens=plan.tokens,
            layers=plan.layers,
            attention=attention,
            routing=routing,
            logits=arrays.get("logits"),
            lens=arrays.get("lens"),
            activations={place: arrays[place] for place in plan.keep},
            changed=changed,
        )

    def _where(self, positions: Tensor) -> Ints:
        return np.searchsorted(self._plan.tokens, positions.numpy())

    def _keep(self, place: str, values: Tensor, positions: Tensor) -> None:
        self._arrays[place][self._where(positions)] = values.numpy()

    def _read_out(self, name: str, i: Any, streams: Tensor, positions: Tensor) -> None:
        self._arrays[name][i][self._where(positions)] = self._engine.read_out(streams, positions).numpy()

    def _reads(self, reads: Reads) -> None:
        at, s = self._where(reads.positions), self._plan.entries(reads.layer)
        parts = {"window": reads.window, "sink": reads.sink[..., None], "mass": reads.mass[..., :s]}
        for name, part in parts.items():
            mass = part if self._plan.per_head else part.mean(1, keepdim=True)
            array = self._arrays[f"{reads.layer}.{name}"]
            if name == "sink":
                array[at] = mass[..., 0].numpy()
            else:
                array[at, :, : mass.shape[-1]] = mass.numpy()
        n = min(s, reads.entries.shape[1])
        self._arrays[f"{reads.layer}.entries"][at, :n] = reads.entries[:, :n].numpy()
        if reads.scores is not None:
            told = reads.scores.masked_fill(reads.entries == ABSENT, 0.0)
            self._arrays[f"{reads.layer}.scores"][at, :n] = told[:, :n].numpy()

    def _routes(self, routes: Routes) -> None:
        at, i = self._where(routes.positions), self._plan.layers.index(routes.layer)
        self._arrays["experts"][i, at] = routes.experts.numpy()
        self._arrays["weights"][i, at] = routes.weights.numpy()
