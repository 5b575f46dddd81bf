"""Which forward a `DeviceEngine` runs: on one GPU, on two that share every layer, on several one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import Contract
from dsv4nb.engine.pair_chunk import PairChunk
from dsv4nb.engine.pair_forward import PairForward
from dsv4nb.engine.pipeline_chunk import PipelineChunk
from dsv4nb.engine.pipeline_forward import PipelineForward
from dsv4nb.engine.rank_chunk import RankChunk
from dsv4nb.engine.rank_forward import RankForward
from dsv4nb.errors import EngineError
from dsv4nb.weights.placement import Kind, SharedKind
from dsv4nb.weights.rank_store import RankWeights

DeviceForward = RankForward | PairForward | PipelineForward
DeviceChunk = RankChunk | PairChunk | PipelineChunk


def require_ranks(ranks: int, kind: SharedKind) -> None:
    """Refuse numbers of GPUs that nothing runs on.

    Raises:
        EngineError: there is none, or more than two are to share every layer.
    """
    if ranks < 1:
        raise EngineError("no GPU; the GPU engine runs on one at least", param="devices")
    if ranks > 2 and kind == "tensor":
        raise EngineError(
            f"{ranks} GPUs; two share every layer at most. placement='pipeline' runs layers on one GPU after the other",
            param="devices",
        )


def kind_of(ranks: Sequence[RankWeights], config: ModelConfig) -> Kind:
    """Return how `ranks` were placed."""
    if len(ranks) == 1:
        return "single"
    return "tensor" if len(ranks[0].layers) == config.num_hidden_layers else "pipeline"


def forward_of(
    ranks: Sequence[RankWeights], config: ModelConfig, contract: Contract, max_seq: int, *, graphs: bool
) -> DeviceForward:
    """Return what runs `ranks`.

    Raises:
        EngineError: it is not that many that run.
        ValueError: two GPUs share every layer and do not reach each other's memory.
    """
    kind = kind_of(ranks, config)
    require_ranks(len(ranks), "tensor" if kind == "single" else kind)
    if kind == "pipeline":
        return PipelineForward(ranks, config, contract, max_seq, graphs=graphs)
    if kind == "tensor":
        return PairForward((ranks[0], ranks[1]), config, contract, max_seq, graphs=graphs)
    return RankForward(ranks[0], config, contract, max_seq, graphs=graphs)
