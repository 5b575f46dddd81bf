"""What happened inside the model on a sequence of ids, as values: who read what, which experts, which activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dsv4nb.checkpoint.config import LayerKind
from dsv4nb.errors import RequestError
from dsv4nb.tables import as_html, as_text, data_frame, percent

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

ABSENT = -1
KIND_WORDS: Mapping[LayerKind, str] = {"swa": "window", "csa": "window + picked by 4", "hca": "window + all by 128"}
_SHOWN = 12  # reads in the text of a table
_TEXT = 40  # characters of a source text


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One thing that a token read.

    Attributes:
        kind: "row": the key/value row of one position; "entry": a compressed entry; "sink": nothing, which takes
            attention too.
        number: position of a row, number of an entry, -1 of the sink.
        first, last: it stands for positions first … last - 1; empty for the sink.
        pools_from: the first position that went into it; a ratio-4 entry reaches into the four before its own.
        mass: share of the attention, mean over the heads.
        score: what the indexer said of an entry, None where nothing is picked.
        text: of the positions it stands for.
    """

    kind: Literal["row", "entry", "sink"]
    number: int
    first: int
    last: int
    pools_from: int
    mass: float
    score: float | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reads:
    """What one token read in one layer: window rows, entries, the sink, in this order; shows as a table.

    Attributes:
        heads: [H, n] masses of `items` by head; None unless they were asked for.
    """

    token: int
    layer: int
    kind: LayerKind
    items: tuple[Read, ...]
    heads: Floats | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[Read]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def of(self, kind: str) -> list[Read]:
        """Return the "row"s, the "entry"s or the "sink"."""
        return [item for item in self.items if item.kind == kind]

    def best(self, n: int = _SHOWN) -> list[Read]:
        """Return the `n` that took the most attention, the largest first."""
        return sorted(self.items, key=lambda item: -item.mass)[:n]

    def to_frame(self) -> Any:
        """Return a pandas data frame, a row per item.

        Raises:
            RequestError: pandas is not installed.
        """
        names = Read.__slots__
        return data_frame([{name: getattr(item, name) for name in names} for item in self.items], names)

    def _facts(self) -> list[tuple[str, str]]:
        masses = ((name, sum(item.mass for item in self.of(kind))) for name, kind in _KINDS)
        return [
            ("token", f"{self.token}, layer {self.layer}, {KIND_WORDS[self.kind]}"),
            ("attention", ", ".join(f"{percent(mass)} {name}" for name, mass in masses)),
        ]

    def _grid(self) -> list[list[str]]:
        shown = self.best()
        rows = [[_named(item), percent(item.mass), _score(item), _shortened(item.text)] for item in shown]
        if len(shown) < len(self):
            rows.append([f"{len(self) - len(shown)} more", "", "", ""])
        return [["read", "mass", "score", "text"], *rows]

    def __str__(self) -> str:
        return as_text(self._facts(), self._grid())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self._facts(), self._grid())


_KINDS = (("window", "row"), ("entries", "entry"), ("sink", "sink"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerReads:
    """What all watched tokens read in one layer; h is H where the heads were asked for, else 1, their mean.

    Attributes:
        ratio: positions per entry, 0 for a layer without.
        window: [n, h, W] mass; column c of token t is position t - W + 1 + c, with mass 0 before position 0.
        sink: [n, h].
        entries: [n, S] numbers of the entries read, ascending, -1 where there are fewer.
        mass: [n, h, S].
        scores: [n, S] of the indexer, None where there is none.
    """

    layer: int
    kind: LayerKind
    ratio: int
    window: Floats
    sink: Floats
    entries: Ints
    mass: Floats
    scores: Floats | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """Which experts the tokens visited; the shared expert, which all visit, is not among them.

    Attributes:
        layers, tokens: axes of the arrays.
        experts: [L, n, K] ascending by id.
        weights: [L, n, K] as they enter the sum; a token's weights sum to the routed scaling factor.
        hashed: by layer, whether the token's id alone decides.
        n_experts: that there are to choose from.
    """

    layers: tuple[int, ...]
    tokens: Ints
    experts: Ints
    weights: Floats
    hashed: tuple[bool, ...]
    n_experts: int

    @property
    def shares(self) -> Floats:
        """[L, n, K]: the weights, made to sum to 1."""
        shares: Floats = self.weights / self.weights.sum(-1, keepdims=True)
        return shares

    def counts(self, tokens: object = None) -> Ints:
        """Return how many of the tokens visited each expert: [L, E].

        Args:
            tokens: positions, all that were watched when None.
        """
        rows = slice(None) if tokens is None else _indices(self.tokens, tokens, "tokens")
        counts = [np.bincount(layer[rows].ravel(), minlength=self.n_experts) for layer in self.experts]
        return np.array(counts, np.int64).reshape(len(self.layers), self.n_experts)

    def to_frame(self) -> Any:
        """Return a pandas data frame, a row per layer, token and expert.

        Raises:
            RequestError: pandas is not installed.
        """
        shares = self.shares
        rows = [
            {"layer": layer, "token": int(token), "expert": int(e), "weight": float(w), "share": float(s)}
            for i, layer in enumerate(self.layers)
            for j, token in enumerate(self.tokens)
            for e, w, s in zip(self.experts[i, j], self.weights[i, j], shares[i, j], strict=True)
        ]
        return data_frame(rows, ("layer", "token", "expert", "weight", "share"))

    def _facts(self) -> list[tuple[str, str]]:
        return [("routing", f"{len(self.tokens):,} tokens to {self.experts.shape[-1]} of {self.n_experts} experts")]

    def _grid(self) -> list[list[str]]:
        if self.n_experts > 16:
            return [["layer", "routed by", "busiest experts"], *map(self._busiest, range(len(self.layers)))]
        head = ["layer", "routed by", *(f"e{e}" for e in range(self.n_experts))]
        rows = zip(self.layers, self.hashed, self.counts(), strict=True)
        return [head, *([str(layer), _routed_by(hashed), *map(str, counts)] for layer, hashed, counts in rows)]

    def _busiest(self, i: int) -> list[str]:
        counts = self.counts()[i]
        best = np.argsort(-counts, kind="stable")[:6]
        told = ", ".join(f"e{e} {counts[e]}" for e in best if counts[e])
        return [str(self.layers[i]), _routed_by(self.hashed[i]), told]

    def __str__(self) -> str:
        return as_text(self._facts(), self._grid())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self._facts(), self._grid())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inspection:
    """What happened inside the model on a sequence of ids; shows as a table of layers.

    Attributes:
        ids: the whole sequence.
        pieces: the bytes of each of its tokens.
        tokens: [n] positions that were watched, ascending; the second axis of all arrays by layer.
        layers: that were watched.
        attention: by layer, as arrays; `reads` tells of one token. Empty when it was not asked for.
        routing: of the watched layers and tokens.
        logits: [n, V] behind the watched tokens; None when they were not asked for.
        lens: [L, n, V] what the head makes of the streams behind each watched layer; None when it was not asked for.
        activations: [n, ...] by name of the place, of those that were asked for.
        changed: places that a tap stood at meanwhile.
    """

    model: str
    ids: tuple[int, ...]
    pieces: tuple[bytes, ...]
    tokens: Ints
    layers: tuple[int, ...]
    attention: Mapping[int, LayerReads]
    routing: Routing
    logits: Floats | None
    lens: Floats | None
    activations: Mapping[str, Floats]
    changed: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        parts: list[object] = [self.tokens, self.routing.experts, self.routing.weights, self.logits, self.lens]
        for one in self.attention.values():
            parts += [one.window, one.sink, one.entries, one.mass, one.scores]
        return sum(part.nbytes for part in (*parts, *self.activations.values()) if isinstance(part, np.ndarray))

    def text(self, first: int = 0, last: int | None = None) -> str:
        """Return the text of positions first … last - 1; broken characters become U+FFFD."""
        return b"".join(self.pieces[first:last]).decode("utf-8", errors="replace")

    def reads(self, token: int, layer: int) -> Reads:
        """Return what a token read in a layer.

        Args:
            token: position; negative counts from the end of the sequence.

        Raises:
            RequestError: the token or the layer was not watched.
        """
        at = token + len(self.ids) if isinstance(token, int) and token < 0 else token
        row = int(_indices(self.tokens, (at,), "token")[0])
        if not self.attention:
            raise RequestError("the attention was not kept; leave out attention=False", param="layer")
        if layer not in self.attention:
            raise RequestError(f"layer {layer!r} was not watched; layers {_list(self.layers)} were", param="layer")
        told = self.attention[layer]
        position, width = int(self.tokens[row]), told.window.shape[-1]
        near = slice(max(width - 1 - position, 0), width)
        far = told.entries[row] != ABSENT
        masses = np.concatenate(
            (told.window[row][:, near], told.mass[row][:, far], told.sink[row][:, None]), axis=1
        )  # [h, items]
        mean = masses.mean(0)
        spans = [*self._rows(position, width), *self._entries(told, row, far), ("sink", -1, 0, 0, 0, None)]
        items = tuple(
            Read(
                kind=kind,
                number=number,
                first=first,
                last=last,
                pools_from=pools_from,
                mass=float(mass),
                score=score,
                text=self.text(first, last) if last > first else "",
            )
            for (kind, number, first, last, pools_from, score), mass in zip(spans, mean, strict=True)
        )
        heads = masses if masses.shape[0] > 1 else None
        return Reads(token=position, layer=layer, kind=told.kind, items=items, heads=heads)

    def _rows(self, position: int, width: int) -> Iterator[_Span]:
        for p in range(max(position - width + 1, 0), position + 1):
            yield "row", p, p, p + 1, p, None

    def _entries(self, told: LayerReads, row: int, far: npt.NDArray[np.bool_]) -> Iterator[_Span]:
        ratio, reach = told.ratio, 2 * told.ratio if told.scores is not None else told.ratio
        scores = None if told.scores is None else told.scores[row][far]
        for i, number in enumerate(map(int, told.entries[row][far])):
            last = ratio * (number + 1)
            score = None if scores is None else float(scores[i])
            yield "entry", number, ratio * number, last, max(last - reach, 0), score

    def _facts(self) -> list[tuple[str, str]]:
        watched = f"{len(self.tokens):,} of {len(self.ids):,} tokens, layers {_list(self.layers)}"
        kept = [name for name, there in (("logits", self.logits), ("lens", self.lens)) if there is not None]
        facts = [("inspection", f"{self.model}: {watched}"), ("arrays", f"{self.nbytes / 2**20:.1f} MiB")]
        if kept or self.activations:
            facts.append(("kept", ", ".join([*kept, *self.activations])))
        if self.changed:
            facts.append(("changed at", ", ".join(self.changed)))
        return facts

    def _grid(self) -> list[list[str]]:
        if not self.attention:
            return self.routing._grid()
        head = ["layer", "reads", "window", "entries", "sink", "entries read", "routed by", "busiest expert"]
        counts = self.routing.counts()
        rows = []
        for i, layer in enumerate(self.layers):
            told = self.attention[layer]
            n = (told.entries != ABSENT).sum(-1).mean() if told.entries.size else 0.0
            window, far, sink = (
                float(part.mean(1).sum(-1).mean()) for part in (told.window, told.mass, told.sink[:, :, None])
            )
            busiest = int(counts[i].argmax())
            rows.append(
                [
                    *(str(layer), KIND_WORDS[told.kind], percent(window), percent(far), percent(sink), f"{n:.1f}"),
                    *(_routed_by(self.routing.hashed[i]), f"e{busiest}, {counts[i][busiest]:,} tokens"),
                ]
            )
        return [head, *rows]

    def __str__(self) -> str:
        return as_text(self._facts(), self._grid())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self._facts(), self._grid())


_Span = tuple[Literal["row", "entry", "sink"], int, int, int, int, float | None]


def _indices(axis: Ints, wanted: object, name: str) -> Ints:
    """Return where `wanted` positions stand in `axis`."""
    positions = np.asarray(list(wanted) if isinstance(wanted, Iterable) else [wanted])
    if positions.size and positions.dtype.kind not in "iu":
        raise RequestError(f"{name} is {wanted!r}; positions are integers", param=name)
    positions = positions.astype(np.int64)
    found = np.searchsorted(axis, positions).clip(max=len(axis) - 1)
    missing = positions[axis[found] != positions]
    if missing.size:
        raise RequestError(f"token {missing[0]} was not watched; tokens {_list(axis.tolist())} were", param=name)
    return found


def _list(numbers: Sequence[int]) -> str:
    """Return ascending numbers in short: 0-5, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    told = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(told if len(told) <= 6 else [*told[:3], "…", told[-1]]) or "none"


def _named(item: Read) -> str:
    if item.kind == "sink":
        return "sink"
    return f"row {item.number}" if item.kind == "row" else f"entry {item.number} ({item.first}-{item.last - 1})"


def _score(item: Read) -> str:
    return "" if item.score is None else f"{item.score:.3g}"


def _shortened(text: str) -> str:
    line = repr(text)[1:-1]
    return line if len(line) <= _TEXT else f"{line[: _TEXT - 1]}…"


def _routed_by(is_hashed: bool) -> str:
    return "token id" if is_hashed else "score"
