"""Checkpoint → weights: reads every tensor once, dequantises it and lays it out.

A NextN block is left on disk, and a DSpark drafter where it is not wanted.
"""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import DSPARK_STAGES, LayerKind, ModelConfig
from dsv4nb.checkpoint.headers import TensorEntry
from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.errors import CheckpointError, NotEnoughMemory
from dsv4nb.weights.packing import unpack_fp4, unpack_fp8, unpack_nvfp4
from dsv4nb.weights.placement import Stored
from dsv4nb.weights.progress import LoadStep, Progress
from dsv4nb.weights.reader import Reader
from dsv4nb.weights.store import (
    AttentionWeights,
    CompressorWeights,
    DraftWeights,
    ExpertWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
    Matrix,
    Weights,
)

ROUTER_ROWS = 8  # the router's matrix is padded to a multiple of this


def load_weights(
    checkpoint: Checkpoint,
    *,
    device: torch.device | str = "cpu",
    drafter: bool = True,
    on_progress: Progress | None = None,
    memory_bytes: int | None = None,
) -> Weights:
    """Read the trunk of `checkpoint` as float32, and its DSpark drafter.

    A drafter with a tensor that is not finite is not kept: its drafts would be noise. `draft_fault` names the tensor.

    Args:
        drafter: read the drafter where there is one.
        device: where the tensors go.
        on_progress: called after each tensor; what it raises ends the load, and nothing stays allocated.
        memory_bytes: what the weights may take; the machine's memory when None.

    Raises:
        NotEnoughMemory: they would take more; nothing was read.
        CheckpointError: a tensor cannot be decoded; nothing stays allocated.
    """
    config = checkpoint.config
    if config.n_shared_experts != 1:
        raise CheckpointError(
            f"n_shared_experts is {config.n_shared_experts}; exactly 1 shared expert is supported",
            param="n_shared_experts",
        )
    room = memory_bytes if memory_bytes is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (needed := 4 * checkpoint.n_weights) > room:
        raise NotEnoughMemory(checkpoint.name, needed, room)
    try:
        return _load(checkpoint, torch.device(device), drafter and checkpoint.drafter == "dspark", on_progress)
    except BaseException as error:
        # a notebook keeps the last traceback, and its frames would keep the tensors read so far
        traceback.clear_frames(error.__traceback__)
        raise


def _load(checkpoint: Checkpoint, device: torch.device, has_drafter: bool, on_progress: Progress | None) -> Weights:
    config = checkpoint.config
    entries = {name: entry for name, entry in checkpoint.entries.items() if has_drafter or not name.startswith("mtp.")}
    layers = []
    with torch.inference_mode(), Reader(entries) as reader:
        source = _Source(reader, device, None if on_progress is None else Meter(reader, entries, [device], on_progress))
        embed, head = source.plain("embed.weight"), source.plain("head.weight")
        hyper_head = _hyper_head(source, "")
        for layer in range(config.num_hidden_layers):
            layers.append(_layer(source, config, f"layers.{layer}.", config.kind(layer), config.compress_ratios[layer]))
        draft, fault = None, ""
        if has_drafter:
            source.not_finite = ""
            draft = _drafter(source, config)
            if source.not_finite:
                draft, fault = None, f"{source.not_finite} is not finite"
    return Weights(
        embed=embed, layers=tuple(layers), hyper_head=hyper_head, head=head, drafter=draft, draft_fault=fault
    )


class Reading(Protocol):
    """What counts the bytes that it has read."""

    bytes_read: int


class Meter:
    """Tells how far the reading has come."""

    def __init__(
        self, reader: Reading, entries: Mapping[str, Stored], devices: Sequence[torch.device], tell: Progress
    ) -> None:
        self._reader, self._tell = reader, tell
        self._devices = [str(device) for device in devices]
        self._total = sum(entry.nbytes for entry in entries.values())
        self._shards: dict[Path, int] = {}
        # of tensors that lie in files
        self._files = {name: entry.file for name, entry in entries.items() if isinstance(entry, TensorEntry)}
        for file in sorted(set(self._files.values())):
            self._shards[file] = len(self._shards) + 1
        self._placed = [0] * len(devices)

    def placed(self, name: str, *placed_bytes: int) -> None:
        """Tell that tensor `name` was read, or some up to it, and what they take on each device."""
        file = self._files.get(name)
        self._placed = [sum(both) for both in zip(self._placed, placed_bytes, strict=True)]
        self._tell(
            LoadStep(
                phase="weights",
                done_bytes=self._reader.bytes_read,
                total_bytes=self._total,
                shard="" if file is None else file.name,
                n_shard=0 if file is None else self._shards[file],
                n_shards=len(self._shards),
                placed=tuple(zip(self._devices, self._placed, strict=True)),
            )
        )


class _Source:
    """Tensors by name, dequantised and on the device.

    Attributes:
        not_finite: the first tensor read that holds a NaN or an infinity, "" while there is none.
    """

    def __init__(self, reader: Reader, device: torch.device, meter: Meter | None) -> None:
        self._reader, self._device, self._meter = reader, device, meter
        self.not_finite = ""

    def __contains__(self, name: str) -> bool:
        return name in self._reader

    def plain(self, name: str) -> Tensor:
        """Return a tensor that is stored as numbers: float32, tables int64."""
        value = self._reader.read(name)
        if value.is_floating_point():
            value = value.to(self._device, torch.float32)
            self._look_at(name, value)
        value = value.to(self._device)
        self._tell(name, value.nbytes)
        return value

    def matrix(self, *names: str) -> Matrix:
        """Return the projections `names` (without ".weight") under each other."""
        parts = [self._decode(name) for name in names]
        for name, (weight, _) in zip(names, parts, strict=True):
            self._look_at(f"{name}.weight", weight)
            self._tell(f"{name}.weight", weight.nbytes)
        kinds = {is_fp8 for _, is_fp8 in parts}
        if len(kinds) > 1:
            raise CheckpointError(f"{' and '.join(names)} are stored in different formats", param=names[0])
        weight = torch.cat([weight for weight, _ in parts]) if len(parts) > 1 else parts[0][0]
        return Matrix(weight=weight.to(self._device), is_fp8=kinds.pop())

    def _tell(self, name: str, placed_bytes: int) -> None:
        if self._meter is not None:
            self._meter.placed(name, placed_bytes)

    def _look_at(self, name: str, value: Tensor) -> None:
        # a sum is finite unless an element is not, or the elements are such as no network has
        if not self.not_finite and not bool(value.sum().isfinite()):
            self.not_finite = name

    def _decode(self, name: str) -> tuple[Tensor, bool]:
        weight = self._reader.read(f"{name}.weight")
        try:
            if f"{name}.weight_scale_2" in self._reader:
                scales = (self._reader.read(f"{name}.{leaf}") for leaf in ("weight_scale", "weight_scale_2"))
                return unpack_nvfp4(weight, *scales), True
            if f"{name}.scale" not in self._reader:
                return weight.to(torch.float32), False
            unpack = unpack_fp4 if self._reader.dtype(f"{name}.weight") == "I8" else unpack_fp8
            return unpack(weight, self._reader.read(f"{name}.scale")), True
        except ValueError as error:
            raise CheckpointError(f"{name}.weight cannot be read: {error}", param=f"{name}.weight") from error


def _drafter(source: _Source, config: ModelConfig) -> DraftWeights:
    last = f"mtp.{DSPARK_STAGES - 1}."
    return DraftWeights(
        main=source.matrix("mtp.0.main_proj"),
        main_norm=source.plain("mtp.0.main_norm.weight"),
        stages=tuple(_layer(source, config, f"mtp.{stage}.", "swa", 0) for stage in range(DSPARK_STAGES)),
        hyper_head=_hyper_head(source, last),
        markov_in=source.plain(f"{last}markov_head.markov_w1.weight"),
        markov_out=source.plain(f"{last}markov_head.markov_w2.weight"),
        confidence=source.plain(f"{last}confidence_head.proj.weight")[0],
    )


def _hyper_head(source: _Source, name: str) -> HyperWeights:
    return HyperWeights(
        fn=source.plain(f"{name}hc_head_fn"),
        scale=source.plain(f"{name}hc_head_scale"),
        base=source.plain(f"{name}hc_head_base"),
        norm=source.plain(f"{name}norm.weight"),
    )


def _layer(source: _Source, config: ModelConfig, name: str, kind: LayerKind, ratio: int) -> LayerWeights:
    return LayerWeights(
        kind=kind,
        ratio=ratio,
        hyper_attention=_hyper(source, config, f"{name}hc_attn", f"{name}attn_norm.weight"),
        attention=_attention(source, config, f"{name}attn.", ratio),
        hyper_experts=_hyper(source, config, f"{name}hc_ffn", f"{name}ffn_norm.weight"),
        experts=_experts(source, config, f"{name}ffn."),
    )


def _hyper(source: _Source, config: ModelConfig, name: str, norm: str) -> HyperWeights:
    parts = torch.tensor([config.hc_mult, config.hc_mult, config.hc_mult**2])
    return HyperWeights(
        fn=source.plain(f"{name}_fn"),
        scale=source.plain(f"{name}_scale").repeat_interleave(parts),
        base=source.plain(f"{name}_base"),
        norm=source.plain(norm),
    )


def _attention(source: _Source, config: ModelConfig, name: str, ratio: int) -> AttentionWeights:
    groups = source.matrix(f"{name}wo_a").weight.chunk(config.o_groups)
    return AttentionWeights(
        down=source.matrix(f"{name}wq_a", f"{name}wkv"),
        q_norm=source.plain(f"{name}q_norm.weight"),
        kv_norm=source.plain(f"{name}kv_norm.weight"),
        query=source.matrix(f"{name}wq_b"),
        sink=source.plain(f"{name}attn_sink"),
        groups=groups,
        out=source.matrix(f"{name}wo_b"),
        compressor=_compressor(source, f"{name}compressor.") if ratio else None,
        indexer=_indexer(source, config, f"{name}indexer.") if ratio == 4 else None,
    )


def _compressor(source: _Source, name: str) -> CompressorWeights:
    scores = source.plain(f"{name}ape")
    return CompressorWeights(
        source=torch.cat((source.plain(f"{name}wkv.weight"), source.plain(f"{name}wgate.weight"))),
        offset=torch.cat((torch.zeros_like(scores), scores), 1),
        norm=source.plain(f"{name}norm.weight"),
    )


def _indexer(source: _Source, config: ModelConfig, name: str) -> IndexerWeights:
    factor = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    return IndexerWeights(
        query=source.matrix(f"{name}wq_b"),
        heads=source.plain(f"{name}weights_proj.weight") * factor,
        compressor=_compressor(source, f"{name}compressor."),
    )


def _experts(source: _Source, config: ModelConfig, name: str) -> ExpertWeights:
    up, down, kinds = [], [], set()
    for expert in [*(f"{name}experts.{e}." for e in range(config.n_routed_experts)), f"{name}shared_experts."]:
        above, below = source.matrix(f"{expert}w1", f"{expert}w3"), source.matrix(f"{expert}w2")
        up.append(above.weight)
        down.append(below.weight)
        kinds |= {above.is_fp8, below.is_fp8}
    if len(kinds) > 1:
        raise CheckpointError(f"some experts of {name} are quantised and some are not", param=f"{name}experts")
    padding = -config.n_routed_experts % ROUTER_ROWS
    bias = table = None
    if f"{name}gate.tid2eid" in source:
        table = source.plain(f"{name}gate.tid2eid")
    else:
        bias = torch.nn.functional.pad(source.plain(f"{name}gate.bias"), (0, padding), value=-math.inf)
    return ExpertWeights(
        gate=torch.nn.functional.pad(source.plain(f"{name}gate.weight"), (0, 0, 0, padding)),
        bias=bias,
        table=table,
        up=torch.stack(up),
        down=torch.stack(down),
        is_fp8=kinds.pop(),
    )
