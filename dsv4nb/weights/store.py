"""The weights of a loaded model, laid out for the engine; nothing writes them after loading.

On the CPU every matrix is float32: FP8, FP4 and NVFP4 weights are exact in it. What remains of a matrix's
format is whether its input is rounded in front of it (model.md 4.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

from torch import Tensor

from dsv4nb.checkpoint.config import LayerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One projection.

    Attributes:
        weight: [N, K].
        is_fp8: stored as FP8 or FP4, so the contract's `act_fp8` rounds its input.
    """

    weight: Tensor
    is_fp8: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperWeights:
    """Coefficients of the residual streams around one sublayer.

    Attributes:
        fn: [2 HC + HC², HC·D]; after the last layer [HC, HC·D].
        scale: one per row of `fn`.
        base: one per row of `fn`.
        norm: [D], the norm between the collapse and what follows.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorWeights:
    """Source rows to entries; n is d, or 2d where windows overlap.

    Attributes:
        source: [2n, D], value rows first, then score rows.
        offset: [ratio, 2n], added by position within the window; zero for the values.
        norm: [d].
    """

    source: Tensor
    offset: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerWeights:
    """What picks entries on a ratio-4 layer.

    Attributes:
        query: [Hi·di, q rank].
        heads: [Hi, D], times the constant di^-½ Hi^-½.
        compressor: of the index keys.
    """

    query: Matrix
    heads: Tensor
    compressor: CompressorWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """One attention sublayer.

    Attributes:
        down: [q rank + hd, D], the query's low rank first, then the key/value row.
        q_norm: [q rank]; kv_norm: [hd].
        query: [H·hd, q rank].
        sink: [H].
        groups: o_groups times [o rank, H·hd / o_groups].
        out: [D, o_groups · o rank].
        compressor: None on a ratio-0 layer; indexer: None unless the ratio is 4.
    """

    down: Matrix
    q_norm: Tensor
    kv_norm: Tensor
    query: Matrix
    sink: Tensor
    groups: tuple[Tensor, ...]
    out: Matrix
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """One mixture sublayer; the shared expert stands last, at index E.

    Attributes:
        gate: [E', D]; E' is E rounded up to a multiple of 8 with rows of zeros.
        bias: [E'], -inf from E on; None on a hash-routed layer.
        table: [V, K] int64; None on a score-routed layer.
        up: [E + 1, 2I, D], gate rows first; down: [E + 1, D, I].
        is_fp8: as in `Matrix`, for `up` and `down`.
    """

    gate: Tensor
    bias: Tensor | None
    table: Tensor | None
    up: Tensor
    down: Tensor
    is_fp8: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One trunk layer."""

    kind: LayerKind
    ratio: int
    hyper_attention: HyperWeights
    attention: AttentionWeights
    hyper_experts: HyperWeights
    experts: ExpertWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWeights:
    """The DSpark drafter; embedding and head are the trunk's. K is the number of tapped layers, r the Markov rank.

    Attributes:
        main: [D, K·D], and main_norm: [D]: the taps of a position to what its context rows are made of.
        stages: layers without a compressor.
        hyper_head: the collapse after the last stage, and the norm in front of the head.
        markov_in, markov_out: [V, r], a token to its row and back to a bias of the next one's logits.
        confidence: [D + r].
    """

    main: Matrix
    main_norm: Tensor
    stages: tuple[LayerWeights, ...]
    hyper_head: HyperWeights
    markov_in: Tensor
    markov_out: Tensor
    confidence: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The trunk, and the drafter where it was loaded.

    Attributes:
        embed: [V, D]; head: [V, D].
        hyper_head: the last collapse and the final norm.
        draft_fault: why a drafter that the checkpoint has is not there, "" when nothing is wrong with it.
    """

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    hyper_head: HyperWeights
    head: Tensor
    drafter: DraftWeights | None = None
    draft_fault: str = ""

    @property
    def resident_bytes(self) -> int:
        """Bytes the tensors take."""
        return sum(t.nbytes for t in tensors_of(self))


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield every tensor of weights, nested as they may be."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
