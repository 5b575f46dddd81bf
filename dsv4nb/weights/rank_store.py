"""The weights of one GPU, in the order in which its kernels read them; nothing writes them after loading.

FP4 and FP8 codes are the checkpoint's, packed and never dequantised. Sizes are `KernelShapes`'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import LayerKind
from dsv4nb.weights.kernel_shapes import KernelShapes
from dsv4nb.weights.store import tensors_of
from dsv4nb_kernels._expert_weights import DownWeights, UpWeights
from dsv4nb_kernels.bf16_rows import Bf16Matrix
from dsv4nb_kernels.fp8_rows import Fp8Matrix
from dsv4nb_kernels.hyper_mix import HyperWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCompressor:
    """Source rows to entries; n is d, or 2d where windows overlap.

    Attributes:
        source: [2n, D], value rows first, then score rows; rows of the layer's `sources`.
        offset: [ratio, 2n] float32, added by position within the window; zero for the values.
        norm: [d] float32.
    """

    source: Bf16Matrix
    offset: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIndexer:
    """What picks entries on a ratio-4 layer.

    Attributes:
        query: [Hi·di, q rank].
        heads: [Hi, D], rows of the layer's `sources`; the constant in front of it is left out, since it puts no entry
            before another.
        compressor: of the index keys.
    """

    query: Fp8Matrix
    heads: Bf16Matrix
    compressor: RankCompressor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAttention:
    """One attention sublayer.

    Attributes:
        down: [q rank + hd, D], the query's low rank first, then the key/value row.
        q_norm: [q rank]; kv_norm: [hd]; sink: [H], float32.
        query: [H·hd, q rank].
        groups: [G · o rank, H·hd / G], a group's rows under each other.
        out: [D, G · o rank].
        sources: what else reads the sublayer's input, in one matrix: the compressor's rows, then those of the indexer's
            compressor and its heads; None on a ratio-0 layer.
        compressor: None on a ratio-0 layer; indexer: None unless the ratio is 4.
    """

    down: Fp8Matrix
    q_norm: Tensor
    kv_norm: Tensor
    query: Fp8Matrix
    sink: Tensor
    groups: Fp8Matrix
    out: Fp8Matrix
    sources: Bf16Matrix | None = None
    compressor: RankCompressor | None = None
    indexer: RankIndexer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExperts:
    """One mixture sublayer.

    Attributes:
        gate: [E, D].
        bias: [E] float32, -inf for rows that are no expert; None on a hash-routed layer.
        table: [V, K] int32; None on a score-routed layer.
        up, down: routed and shared experts.
    """

    gate: Bf16Matrix
    bias: Tensor | None
    table: Tensor | None
    up: UpWeights
    down: DownWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayer:
    """One trunk layer."""

    kind: LayerKind
    ratio: int
    hyper_attention: HyperWeights
    attention: RankAttention
    hyper_experts: HyperWeights
    experts: RankExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDraft:
    """The DSpark drafter, whole, as one GPU runs it; r is the Markov rank, K the number of tapped layers.

    Attributes:
        shapes: of its stages.
        embed: [V, D] bfloat16; head: [V, D]; the trunk's, which lie in memory once.
        main: [D, K·D], from the taps; main_norm: [D] float32.
        stages: each a layer of ratio 0.
        hyper_head: the collapse behind the last stage, and its norm.
        markov_in, markov_out: [V, r] bfloat16.
        confidence: [D + r] float32, of the collapsed stream, then of the token before.
    """

    shapes: KernelShapes
    embed: Tensor
    head: Bf16Matrix
    main: Fp8Matrix
    main_norm: Tensor
    stages: tuple[RankLayer, ...]
    hyper_head: HyperWeights
    markov_in: Tensor
    markov_out: Tensor
    confidence: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """What one rank holds.

    Attributes:
        embed: [V, D] bfloat16; head: [V, D], of several ranks each has its range of the vocabulary. In a pipeline a
            rank that does not need one of them has no row of it.
        layers: those that it runs, from number `first_layer` on.
        hyper_head: the last collapse and the final norm; without a head it is empty.
        draft: None without a drafter, and on every rank but one.
        draft_fault: why the checkpoint's drafter is not kept; "" where it is, and where it was not wanted.
    """

    device: torch.device
    shapes: KernelShapes
    embed: Tensor
    layers: tuple[RankLayer, ...]
    hyper_head: HyperWeights
    head: Bf16Matrix
    draft: RankDraft | None = None
    draft_fault: str = ""
    first_layer: int = 0

    @property
    def span(self) -> range:
        """Numbers of the layers that it runs."""
        return range(self.first_layer, self.first_layer + len(self.layers))

    @property
    def resident_bytes(self) -> int:
        """Bytes the tensors take, each once: some are rows of others, and the trunk and the drafter share some."""
        total = end = 0
        for first, last in sorted(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors_of(self)
        ):
            total += max(last - max(first, end), 0)
            end = max(end, last)
        return total
