"""Which slice of which stored tensor lives on which rank; pure.

    placement = place(config, checkpoint.entries, ranks=2, kind="tensor")
    for name in checkpoint.entries:
        part = placement.parts(name)[rank]
        if part is not None:
            mine = reader.read(name)[part.index]

single      one rank holds everything
tensor      every rank runs every layer and holds a share of each large matrix: whole groups of heads (wq_b, attn_sink,
            wo_a by rows, wo_b by columns), a range of the inner width of every expert, routed and shared (w1 and w3 by
            rows, w2 by columns), a range of the vocabulary (head). The rest is whole on every rank: to split the small
            projections would cost a join each, and a looked-up row (embed) would too. The drafter is whole on the first
            rank, which has every residual stream, and with it the whole head: so no draft waits for another rank
pipeline    a rank runs consecutive layers, cut so that the largest rank is as small as can be. `embed` is on the first;
            the head and the drafter are on the last, with a second `embed` for the drafter where there is one

A scale is cut where its weight is. Ranges are whole blocks of every format but one: where a rank's range is an equal
part of one 128x128 tile of FP8, as in models smaller than V4-Flash, each rank that shares the tile has its scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, Protocol

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.checkpoint.inventory import FP4_BLOCK, FP8_BLOCK
from dsv4nb.checkpoint.names import TensorName, parse_name
from dsv4nb.errors import RequestError

SharedKind = Literal["tensor", "pipeline"]
Kind = Literal["single", "tensor", "pipeline"]

# classes of tensors in reports; a sublayer's norm stands where its matrices do, the two of a block with the streams
CLASSES = (
    *("embed", "head", "streams", "attention", "compressor", "indexer", "router", "experts", "shared"),
    "drafter",
)

_BY_ROWS = (
    "attn.wq_b",
    "attn.wo_a",
    *(f"ffn.{kind}.{w}" for kind in ("experts", "shared_experts") for w in ("w1", "w3")),
)
_BY_COLUMNS = ("attn.wo_b", "ffn.experts.w2", "ffn.shared_experts.w2")
_BY_VOCABULARY = ("head",)
# axis by module; of its one-number leaves (`weight_scale_2`) every rank has a copy
_AXES = {**dict.fromkeys((*_BY_ROWS, *_BY_VOCABULARY), 0), **dict.fromkeys(_BY_COLUMNS, 1)}
_WHOLE_LEAVES = ("weight_scale_2", "input_scale")


class Stored(Protocol):
    """A tensor as the files have it: a `TensorEntry`, or a `Spec`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank holds of one stored tensor.

    Attributes:
        axis: of the stored shape; 0 for a whole tensor.
        first, last: the range [first, last) along it, in stored elements: rows, or columns of FP8 and bf16, but bytes
            of two columns of FP4 and NVFP4, and blocks of a scale.
        shape: of the part.
    """

    axis: int
    first: int
    last: int
    shape: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """What cuts the part out: `tensor[part.index]`."""
        return (slice(None),) * self.axis + (slice(self.first, self.last),) if self.shape else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the tensors of one checkpoint live.

    Attributes:
        entries: the tensors that are placed, by official name.
        layers: of each rank, the trunk layers that it runs.
    """

    kind: Kind
    entries: Mapping[str, Stored]
    layers: tuple[range, ...]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.layers)

    @property
    def shares(self) -> int:
        """Ranks that a large matrix is cut for."""
        return 1 if self.kind == "pipeline" else self.ranks

    @property
    def drafting(self) -> int:
        """The rank that has the drafter, where there is one."""
        return self.ranks - 1 if self.kind == "pipeline" else 0

    def parts(self, name: str) -> tuple[Part | None, ...]:
        """Return what each rank holds of tensor `name`, None where it holds nothing.

        Raises:
            KeyError: `name` is not placed.
        """
        stored, where = self.entries[name], parse_name(name)
        if self.kind == "tensor":
            if where.stack == "mtp":
                return (_whole(stored.shape), *([None] * (self.ranks - 1)))
            axis = _axis(where)
            if axis is None or self.ranks == 1:
                return (_whole(stored.shape),) * self.ranks
            shares = tuple(_share(stored.shape, axis, rank, self.ranks) for rank in range(self.ranks))
            drafts = where.module == "head" and _has_drafter(self.entries)
            return (_whole(stored.shape), *shares[1:]) if drafts else shares
        whole = _whole(stored.shape)
        return tuple(whole if rank in self._holders(where) else None for rank in range(self.ranks))

    def nbytes(self, rank: int) -> dict[str, int]:
        """Return the bytes that `rank` holds, by class, in the order of `CLASSES`."""
        held = dict.fromkeys(CLASSES, 0)
        for name, stored in self.entries.items():
            part = self.parts(name)[rank]
            if part is not None:
                extent = stored.shape[part.axis] if stored.shape else 1
                held[class_of(name)] += stored.nbytes * (part.last - part.first) // extent
        return held

    def _holders(self, where: TensorName) -> Sequence[int]:
        """Ranks of a pipeline that hold a tensor."""
        last = self.ranks - 1
        if where.stack == "layers":
            return [rank for rank, layers in enumerate(self.layers) if where.layer in layers]
        if where.part != "embed.weight":
            return [last]
        return [0, last] if _has_drafter(self.entries) else [0]


def place(config: ModelConfig, entries: Mapping[str, Stored], *, ranks: int, kind: Kind) -> Placement:
    """Decide which rank holds what.

    Args:
        entries: the tensors to place, as stored; leave out `mtp.*` to run without the drafter.
        ranks: 1 for "single".

    Raises:
        RequestError: the model does not divide into that many ranks; `param` is the field of the config that does not,
            and the message says the counts that fit.
    """
    if ranks < 1:
        raise RequestError(f"ranks is {ranks}; at least 1 is needed", param="ranks")
    n_layers = config.num_hidden_layers
    if kind == "single" and ranks > 1:
        raise RequestError(f"placement 'single' has 1 rank, not {ranks}; use 'tensor' or 'pipeline'", param="ranks")
    if kind == "pipeline":
        if ranks > n_layers:
            raise RequestError(
                f"num_hidden_layers is {n_layers}: a pipeline of {ranks} ranks has some without a layer. "
                f"Use at most {n_layers} ranks.",
                param="num_hidden_layers",
            )
        return Placement(kind=kind, entries=entries, layers=_spans(entries, n_layers, ranks))
    _require_even(config, ranks)
    return Placement(kind=kind, entries=entries, layers=(range(n_layers),) * ranks)


def class_of(name: str) -> str:
    """Return the class of tensor `name`, one of `CLASSES`."""
    where = parse_name(name)
    if where.stack == "mtp":
        return "drafter"
    if where.stack == "top":
        return {"embed.weight": "embed", "head.weight": "head"}.get(where.part, "streams")
    words = where.part.split(".")
    match words:
        case ["attn", "compressor" | "indexer" as name_of_part, *_]:
            return name_of_part
        case ["attn", *_]:
            return "attention"
        case ["ffn", "gate", *_]:
            return "router"
        case ["ffn", "experts", *_]:
            return "experts"
        case ["ffn", "shared_experts", *_]:
            return "shared"
    return "streams"


def _axis(where: TensorName) -> int | None:
    """Axis along which a tensor is split by "tensor", None where every rank has all of it."""
    if where.part == "attn.attn_sink":
        return 0
    return None if where.leaf in _WHOLE_LEAVES else _AXES.get(where.module)


def _share(shape: tuple[int, ...], axis: int, rank: int, ranks: int) -> Part:
    extent = shape[axis]
    first, step = rank * extent // ranks, max(extent // ranks, 1)  # one where ranks share a tile and so its scale
    assert extent % ranks == 0 or ranks % extent == 0, (shape, axis, ranks)
    return Part(axis=axis, first=first, last=first + step, shape=(*shape[:axis], step, *shape[axis + 1 :]))


def _whole(shape: tuple[int, ...]) -> Part:
    return Part(axis=0, first=0, last=shape[0] if shape else 1, shape=shape)


def _has_drafter(entries: Mapping[str, Stored]) -> bool:
    return any(name.startswith("mtp.") for name in entries)


def _units(c: ModelConfig) -> tuple[tuple[str, int, int, str], ...]:
    """Fields that must divide: (field, extent, multiple that a rank needs, what that is)."""
    tile = FP8_BLOCK if c.quantized else 1
    tiles = f" in FP8 tiles of {tile}" if c.quantized else ""
    return (
        ("o_groups", c.o_groups, 1, "groups of heads"),
        ("num_attention_heads", c.num_attention_heads * c.head_dim, tile, f"rows{tiles}"),
        ("o_lora_rank", c.o_groups * c.o_lora_rank, tile, f"rows{tiles}"),
        ("moe_intermediate_size", c.moe_intermediate_size, tile, f"columns{tiles}"),
        ("vocab_size", c.vocab_size, 1, "tokens"),
    )


def _require_even(config: ModelConfig, ranks: int) -> None:
    def fits(extent: int, multiple: int, ranks: int) -> bool:
        share, rest = divmod(extent, ranks)
        if ranks == 1 or rest:
            return ranks == 1
        shares_a_tile = extent % multiple == 0 and multiple % share == 0 and share % FP4_BLOCK == 0
        return share % multiple == 0 or shares_a_tile

    units = _units(config)
    for field, extent, multiple, what in units:
        if not fits(extent, multiple, ranks):
            counts = [n for n in range(1, config.o_groups + 1) if all(fits(e, m, n) for _, e, m, _ in units)]
            raise RequestError(
                f"{field} is {getattr(config, field)}: {extent} {what} do not divide into {ranks} ranks. "
                f"Tensor placement of this model takes {_either(counts)} ranks; a pipeline takes "
                f"up to {config.num_hidden_layers}.",
                param=field,
            )


def _either(counts: Sequence[int]) -> str:
    return " or ".join(filter(None, (", ".join(map(str, counts[:-1])), str(counts[-1]))))


def _spans(entries: Mapping[str, Stored], n_layers: int, ranks: int) -> tuple[range, ...]:
    """Cut the layers so that the rank with the most bytes has as few as can be; the earliest such cuts."""
    weights, first, last = [0] * n_layers, 0, 0
    for name, stored in entries.items():
        where = parse_name(name)
        if where.layer is not None and where.stack == "layers":
            weights[where.layer] += stored.nbytes
        elif name == "embed.weight":
            first += stored.nbytes
            last += stored.nbytes if ranks > 1 and _has_drafter(entries) else 0
        else:
            last += stored.nbytes
    ends = [0, *accumulate(weights)]

    def load(rank: int, start: int, stop: int) -> int:
        return ends[stop] - ends[start] + (first if rank == 0 else 0) + (last if rank == ranks - 1 else 0)

    # best[stop]: the smallest largest load of ranks 0 … rank over layers 0 … stop - 1, and the cuts that give it
    best: dict[int, tuple[int, tuple[int, ...]]] = {
        stop: (load(0, 0, stop), (0, stop)) for stop in range(1, n_layers + 1)
    }
    for rank in range(1, ranks):
        best = {
            stop: min(
                (max(most, load(rank, start, stop)), (*cuts, stop))
                for start, (most, cuts) in best.items()
                if start < stop
            )
            for stop in range(rank + 1, n_layers + 1)
        }
    cuts = best[n_layers][1]
    return tuple(range(a, b) for a, b in pairwise(cuts))
