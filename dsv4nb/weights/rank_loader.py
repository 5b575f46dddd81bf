"""Stored tensors → the weights of each rank: takes every tensor once, packs it on its GPU and keeps nothing else.

Tensors are taken when they are packed, so that few are there as they are stored: one on the host, and a GPU's own part
of those that are packed together, which are some experts of a layer at most.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import DSPARK_STAGES, ModelConfig
from dsv4nb.checkpoint.headers import TensorEntry
from dsv4nb.checkpoint.inventory import ExpertFormat
from dsv4nb.errors import CheckpointError, DamagedCheckpoint, NotEnoughMemory
from dsv4nb.weights.draft_layout import draft_limit, not_a_number, pack_draft
from dsv4nb.weights.kernel_layout import StoredBlock, pack_hyper, pack_layer
from dsv4nb.weights.kernel_shapes import KernelShapes, kernel_shapes, rank_config
from dsv4nb.weights.loader import Meter
from dsv4nb.weights.placement import Placement, Stored, place
from dsv4nb.weights.progress import Progress
from dsv4nb.weights.rank_store import RankDraft, RankLayer, RankWeights
from dsv4nb.weights.reader import Reader, TensorSource
from dsv4nb_kernels import bf16_rows
from dsv4nb_kernels.hyper_mix import HyperWeights


class Artifact(Protocol):
    """What is loaded: a `Checkpoint`, or what a `SyntheticReader` makes up."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def expert_format(self) -> ExpertFormat: ...

    @property
    def entries(self) -> Mapping[str, Stored]:
        """Every tensor, by official name."""
        ...


def load_ranks(
    checkpoint: Artifact,
    devices: Sequence[torch.device],
    *,
    drafter: bool = False,
    source: TensorSource | None = None,
    on_progress: Progress | None = None,
) -> tuple[RankWeights, ...]:
    """Read the trunk of `checkpoint` for the kernels, one rank on each of `devices`, and its DSpark drafter.

    A drafter that is not finite, or that the kernels do not run, is not kept: `draft_fault` says why.

    More than one rank share every large matrix; see `placement`, kind "tensor".

    Args:
        devices: one for each rank; a CPU may stand there several times.
        drafter: read the drafter where there is one.
        source: has the tensors; the checkpoint's own files when None.
        on_progress: called after each tensor; what it raises ends the load, and nothing stays allocated.

    Raises:
        CheckpointError: the model's sizes or formats are none that the kernels run, or a tensor cannot be packed;
            nothing stays allocated.
        RequestError: the model does not divide into so many ranks; nothing was read.
        NotEnoughMemory: the weights are larger than what a GPU has free; nothing was read.
    """
    if checkpoint.expert_format != "fp4":
        raise CheckpointError(
            f"the experts of {checkpoint.name} are stored as {checkpoint.expert_format}; the GPU engine runs FP4."
            " devices='cpu' runs this model",
            param="expert_dtype",
        )
    ranks = len(devices)
    drafter = drafter and checkpoint.config.dspark is not None
    fault = draft_limit(checkpoint.config, ranks) if drafter else ""
    reads_drafter = drafter and not fault
    entries = {
        name: entry for name, entry in checkpoint.entries.items() if reads_drafter or not name.startswith("mtp.")
    }
    placement = place(checkpoint.config, entries, ranks=ranks, kind="single" if ranks == 1 else "tensor")
    shapes = kernel_shapes(checkpoint.config, ranks)
    for rank, device in enumerate(devices):
        _require_room(checkpoint.name, sum(placement.nbytes(rank).values()), device)
    try:
        with torch.inference_mode(), source or Reader(_in_files(entries)) as reader:
            meter = None if on_progress is None else Meter(reader, entries, devices, on_progress)
            return _Loading(checkpoint, shapes, tuple(devices), reader, meter, placement, fault).run(entries)
    except BaseException as error:
        # a notebook keeps the last traceback, and its frames would keep the tensors read so far
        traceback.clear_frames(error.__traceback__)
        raise


class _Loading:
    """One load on its way."""

    def __init__(
        self,
        checkpoint: Artifact,
        shapes: KernelShapes,
        devices: tuple[torch.device, ...],
        reader: TensorSource,
        meter: Meter | None,
        placement: Placement,
        draft_fault: str,
    ) -> None:
        self._config, self._shapes, self._devices = checkpoint.config, shapes, devices
        self._reader, self._meter, self._placement = reader, meter, placement
        self._draft_fault = draft_fault

    def run(self, entries: Mapping[str, Stored]) -> tuple[RankWeights, ...]:
        config = self._config
        top = self._blocks([name for name in entries if not name.startswith(("layers.", "mtp."))], "")
        layers: list[list[RankLayer]] = [[] for _ in self._devices]
        for number in range(config.num_hidden_layers):
            prefix = f"layers.{number}."
            for rank, block in enumerate(self._under(prefix, entries)):
                layers[rank].append(self._pack(block, number))
        drafts = self._drafts(entries)
        return tuple(
            RankWeights(
                device=device,
                shapes=self._shapes,
                embed=block.bf16("embed.weight"),
                layers=tuple(own),
                hyper_head=self._hyper_head(block),
                head=bf16_rows.pack(block.bf16("head.weight")),
                draft=draft,
                draft_fault=self._draft_fault,
            )
            for device, block, own, draft in zip(self._devices, top, layers, drafts, strict=True)
        )

    def _drafts(self, entries: Mapping[str, Stored]) -> Sequence[RankDraft | None]:
        """Read the drafter: each rank's, or none and why."""
        missing = [None] * len(self._devices)
        if not any(name.startswith("mtp.") for name in entries):
            return missing
        try:
            drafts = self._packed_drafts(entries)
        except DamagedCheckpoint:
            raise
        except (ValueError, CheckpointError) as error:
            self._draft_fault = self._draft_fault or f"it cannot be packed: {error}"
        return missing if self._draft_fault else drafts

    def _packed_drafts(self, entries: Mapping[str, Stored]) -> list[RankDraft]:
        config = rank_config(self._config, len(self._devices))
        blocks = [self._under(f"mtp.{stage}.", entries) for stage in range(DSPARK_STAGES)]
        stages = [
            [pack_layer(block, config, self._shapes, kind="swa", ratio=0) for block in of_ranks] for of_ranks in blocks
        ]
        return [
            pack_draft(first, last, own, config)
            for first, last, own in zip(blocks[0], blocks[-1], zip(*stages, strict=True), strict=True)
        ]

    def _under(self, prefix: str, entries: Mapping[str, Stored]) -> list[StoredBlock]:
        return self._blocks([name for name in entries if name.startswith(prefix)], prefix)

    def _blocks(self, names: Sequence[str], prefix: str) -> list[StoredBlock]:
        """Return each rank's block of tensors, which are read when they are asked for."""
        parts: list[dict[str, Tensor]] = [{} for _ in self._devices]

        def read(name: str) -> None:
            for own, part in zip(parts, self._parts(prefix + name), strict=True):
                if part is not None:
                    own[name] = part

        held = [name.removeprefix(prefix) for name in names]
        return [StoredBlock(_Unread(held, own, read)) for own in parts]

    def _parts(self, name: str) -> list[Tensor | None]:
        """Read a tensor and return each rank's part, on its device."""
        tensor = self._reader.read(name)
        if name.startswith("mtp.") and not self._draft_fault:
            self._draft_fault = not_a_number(name, tensor)
        placed = zip(self._placement.parts(name), self._devices, strict=True)
        parts = [None if part is None else tensor[part.index].to(device) for part, device in placed]
        if self._meter is not None:
            self._meter.placed(name, *(0 if part is None else part.nbytes for part in parts))
        return parts

    def _pack(self, block: StoredBlock, number: int) -> RankLayer:
        config = rank_config(self._config, len(self._devices))
        try:
            return pack_layer(
                block, config, self._shapes, kind=config.kind(number), ratio=config.compress_ratios[number]
            )
        except ValueError as error:
            raise CheckpointError(f"layers.{number} cannot be packed: {error}", param=f"layers.{number}") from error

    def _hyper_head(self, block: StoredBlock) -> HyperWeights:
        return pack_hyper(block, self._config, "hc_head", "norm.weight")


class _Unread(Mapping[str, Tensor]):
    """The tensors of one block for one rank; each can be taken once, and is not held afterwards.

    Args:
        parts: what was read already, for another rank.
        read: puts a tensor's parts into the `parts` of every rank.
    """

    def __init__(self, names: Sequence[str], parts: dict[str, Tensor], read: Callable[[str], None]) -> None:
        self._names, self._parts, self._read = frozenset(names), parts, read

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._parts:
            self._read(name)
        return self._parts.pop(name)


def _in_files(entries: Mapping[str, Stored]) -> dict[str, TensorEntry]:
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorEntry)}


def _require_room(name: str, needed_bytes: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if needed_bytes > free:
        raise NotEnoughMemory(name, needed_bytes, free, f"as it is stored, on {device}")
