"""Checkpoint → the weights of each rank: reads every tensor once, packs it on its GPU and keeps nothing else."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dsv4nb.checkpoint.headers import TensorEntry
from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.errors import CheckpointError, NotEnoughMemory
from dsv4nb.weights.kernel_layout import StoredBlock, pack_hyper, pack_layer
from dsv4nb.weights.kernel_shapes import KernelShapes, kernel_shapes
from dsv4nb.weights.loader import Meter
from dsv4nb.weights.placement import Placement, place
from dsv4nb.weights.progress import Progress
from dsv4nb.weights.rank_store import RankLayer, RankWeights
from dsv4nb.weights.reader import Reader
from dsv4nb_kernels import bf16_rows
from dsv4nb_kernels.hyper_mix import HyperWeights


def load_ranks(
    checkpoint: Checkpoint,
    devices: Sequence[torch.device],
    *,
    on_progress: Progress | None = None,
) -> tuple[RankWeights, ...]:
    """Read the trunk of `checkpoint` for the kernels, one rank on each of `devices`. Drafters stay on disk.

    Args:
        on_progress: called after each tensor; what it raises ends the load, and nothing stays allocated.

    Raises:
        CheckpointError: the model's sizes or formats are none that the kernels run, or a tensor cannot be packed;
            nothing stays allocated.
        NotEnoughMemory: the weights are larger than what a GPU has free; nothing was read.
    """
    if checkpoint.expert_format != "fp4":
        raise CheckpointError(
            f"the experts of {checkpoint.name} are stored as {checkpoint.expert_format}; the GPU engine runs FP4."
            " devices='cpu' runs this model",
            param="expert_dtype",
        )
    if len(devices) != 1:
        raise CheckpointError(f"weights for {len(devices)} ranks; the GPU engine runs on one GPU", param="devices")
    shapes = kernel_shapes(checkpoint.config)
    entries = {name: entry for name, entry in checkpoint.entries.items() if not name.startswith("mtp.")}
    placement = place(checkpoint.config, entries, ranks=len(devices), kind="single")
    _require_room(checkpoint.name, sum(entry.nbytes for entry in entries.values()), devices)
    try:
        with torch.inference_mode(), Reader(entries) as reader:
            meter = None if on_progress is None else Meter(reader, entries, devices[0], on_progress)
            return _Loading(checkpoint, shapes, tuple(devices), reader, meter, placement).run(entries)
    except BaseException as error:
        # a notebook keeps the last traceback, and its frames would keep the tensors read so far
        traceback.clear_frames(error.__traceback__)
        raise


class _Loading:
    """One load on its way."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: KernelShapes,
        devices: tuple[torch.device, ...],
        reader: Reader,
        meter: Meter | None,
        placement: Placement,
    ) -> None:
        self._config, self._shapes, self._devices = checkpoint.config, shapes, devices
        self._reader, self._meter, self._placement = reader, meter, placement

    def run(self, entries: Mapping[str, TensorEntry]) -> tuple[RankWeights, ...]:
        config = self._config
        top = self._blocks([name for name in entries if not name.startswith("layers.")], "")
        layers: list[list[RankLayer]] = [[] for _ in self._devices]
        for number in range(config.num_hidden_layers):
            prefix = f"layers.{number}."
            names = [name for name in entries if name.startswith(prefix)]
            for rank, block in enumerate(self._blocks(names, prefix)):
                layers[rank].append(self._pack(block, number))
        return tuple(
            RankWeights(
                device=device,
                shapes=self._shapes,
                embed=block.bf16("embed.weight"),
                layers=tuple(own),
                hyper_head=self._hyper_head(block),
                head=bf16_rows.pack(block.bf16("head.weight")),
            )
            for device, block, own in zip(self._devices, top, layers, strict=True)
        )

    def _blocks(self, names: Sequence[str], prefix: str) -> list[StoredBlock]:
        """Read tensors once and hand each rank its parts, on its device."""
        kept: list[dict[str, Tensor]] = [{} for _ in self._devices]
        for name in names:
            tensor = self._reader.read(name)
            parts = self._placement.parts(name)
            for own, part, device in zip(kept, parts, self._devices, strict=True):
                if part is not None:
                    own[name.removeprefix(prefix)] = tensor[part.index].to(device)
            if self._meter is not None:
                self._meter.placed(name, tensor.nbytes)
        return [StoredBlock(tensors) for tensors in kept]

    def _pack(self, block: StoredBlock, number: int) -> RankLayer:
        config = self._config
        try:
            return pack_layer(
                block, config, self._shapes, kind=config.kind(number), ratio=config.compress_ratios[number]
            )
        except ValueError as error:
            raise CheckpointError(f"layers.{number} cannot be packed: {error}", param=f"layers.{number}") from error

    def _hyper_head(self, block: StoredBlock) -> HyperWeights:
        return pack_hyper(block, self._config, "hc_head", "norm.weight")


def _require_room(name: str, needed_bytes: int, devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type != "cuda":
            continue
        free, _ = torch.cuda.mem_get_info(device)
        if needed_bytes > free:
            raise NotEnoughMemory(name, needed_bytes, free, f"as it is stored, on {device}")
