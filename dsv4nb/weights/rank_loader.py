"""Stored tensors → the weights of each rank: takes every tensor once, packs it on its GPU and keeps nothing else.

Tensors are taken when they are packed, so that few are there as they are stored: a ring of what is read ahead on the
host, and a GPU's own part of those that are packed together, which are some experts of a layer at most, or come next.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import DSPARK_STAGES, ModelConfig
from dsv4nb.checkpoint.headers import TensorEntry
from dsv4nb.checkpoint.inventory import ExpertFormat
from dsv4nb.errors import CheckpointError, DamagedCheckpoint
from dsv4nb.weights.draft_layout import draft_limit, not_a_number, pack_draft
from dsv4nb.weights.kernel_layout import StoredBlock, first_rows, no_hyper, no_rows, pack_hyper, pack_layer
from dsv4nb.weights.kernel_shapes import KernelShapes, kernel_shapes, rank_config
from dsv4nb.weights.load_order import load_order
from dsv4nb.weights.loader import Meter
from dsv4nb.weights.pieces import Batch, batch_of
from dsv4nb.weights.placement import Placement, SharedKind, Stored, place
from dsv4nb.weights.progress import Progress
from dsv4nb.weights.rank_parts import FileParts, MadeParts, Names, Parts
from dsv4nb.weights.rank_store import RankDraft, RankLayer, RankWeights
from dsv4nb.weights.reader import TensorSource
from dsv4nb.weights.room import require_room
from dsv4nb_kernels import bf16_rows
from dsv4nb_kernels.bf16_rows import Bf16Matrix
from dsv4nb_kernels.hyper_mix import HyperWeights

_Blocks = Mapping[str, set[str]]  # names inside each block by its prefix, such as "layers.7."


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
    kind: SharedKind = "tensor",
    drafter: bool = False,
    source: TensorSource | None = None,
    on_progress: Progress | None = None,
) -> tuple[RankWeights, ...]:
    """Read the trunk of `checkpoint` for the kernels, one rank on each of `devices`, and its DSpark drafter.

    A drafter that is not finite, or that the kernels do not run, is not kept: `draft_fault` says why.

    Args:
        devices: one for each rank; a CPU may stand there several times.
        kind: how several ranks share the model; see `placement`. One has everything.
        drafter: read the drafter where there is one.
        source: has the tensors; the checkpoint's own files when None.
        on_progress: called after each tensor, or one of each of some experts; what it raises ends the load, and nothing
            stays allocated.

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
    fault = draft_limit(checkpoint.config) if drafter else ""
    reads_drafter = drafter and not fault
    entries = {
        name: entry for name, entry in checkpoint.entries.items() if reads_drafter or not name.startswith("mtp.")
    }
    placement = place(checkpoint.config, entries, ranks=ranks, kind="single" if ranks == 1 else kind)
    shapes = kernel_shapes(checkpoint.config, placement.shares)
    batches = [batch_of(names, entries, placement) for names in load_order(entries, checkpoint.config)]
    needed = [sum(batch.held_bytes(rank) for batch in batches) for rank in range(ranks)]
    require_room(checkpoint.name, checkpoint.config, entries, devices, kind, needed)
    try:
        with torch.inference_mode(), _parts(source, entries, batches, placement, devices) as parts:
            meter = None if on_progress is None else Meter(parts, entries, devices, on_progress)
            return _Loading(checkpoint, shapes, tuple(devices), parts, meter, placement, fault).run(entries)
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
        parts: Parts,
        meter: Meter | None,
        placement: Placement,
        draft_fault: str,
    ) -> None:
        self._config, self._shapes, self._devices = checkpoint.config, shapes, devices
        self._parts, self._meter, self._placement = parts, meter, placement
        self._draft_fault = draft_fault

    def run(self, entries: Mapping[str, Stored]) -> tuple[RankWeights, ...]:
        config = self._config
        blocks = _by_block(entries)
        top = self._blocks("", blocks)
        layers: list[list[RankLayer]] = [[] for _ in self._devices]
        for number in range(config.num_hidden_layers):
            held = [rank for rank, span in enumerate(self._placement.layers) if number in span]
            stored = self._blocks(f"layers.{number}.", blocks)
            for rank, layer in zip(held, self._pack([stored[rank] for rank in held], number), strict=True):
                layers[rank].append(layer)
        embeds = [self._embed(block, rank) for rank, block in enumerate(top)]
        heads = [self._head(block, rank) for rank, block in enumerate(top)]
        hyper_heads = [self._hyper_head(block, rank) for rank, block in enumerate(top)]
        drafting = self._placement.drafting
        draft = self._draft(blocks, embeds[drafting], heads[drafting])
        rows = config.vocab_size // self._placement.shares
        heads[drafting] = first_rows(heads[drafting], rows, is_shared=draft is not None)
        return tuple(
            RankWeights(
                device=device,
                shapes=self._shapes,
                embed=embeds[rank],
                layers=tuple(layers[rank]),
                hyper_head=hyper_heads[rank],
                head=heads[rank],
                draft=draft if rank == drafting else None,
                draft_fault=self._draft_fault,
                first_layer=self._placement.layers[rank].start,
            )
            for rank, device in enumerate(self._devices)
        )

    def _holds(self, name: str, rank: int) -> bool:
        return self._placement.parts(name)[rank] is not None

    def _embed(self, top: StoredBlock, rank: int) -> Tensor:
        if self._holds("embed.weight", rank):
            return top.bf16("embed.weight")
        return torch.empty(0, self._config.hidden_size, dtype=torch.bfloat16, device=self._devices[rank])

    def _head(self, top: StoredBlock, rank: int) -> Bf16Matrix:
        if self._holds("head.weight", rank):
            return bf16_rows.pack(top.bf16("head.weight"))
        return no_rows(self._config.hidden_size, self._devices[rank])

    def _hyper_head(self, top: StoredBlock, rank: int) -> HyperWeights:
        if self._holds("norm.weight", rank):
            return pack_hyper(top, self._config, "hc_head", "norm.weight")
        return no_hyper(self._devices[rank])

    def _draft(self, blocks: _Blocks, embed: Tensor, head: Bf16Matrix) -> RankDraft | None:
        """Read the drafter, which one rank has; None where there is none, or where it cannot be run."""
        if "mtp.0." not in blocks:
            return None
        try:
            draft = self._packed_draft(blocks, embed, head)
        except DamagedCheckpoint:
            raise
        except (ValueError, CheckpointError) as error:
            self._draft_fault = self._draft_fault or f"it cannot be packed: {error}"
        return None if self._draft_fault else draft

    def _packed_draft(self, blocks: _Blocks, embed: Tensor, head: Bf16Matrix) -> RankDraft:
        config, shapes, rank = self._config, kernel_shapes(self._config), self._placement.drafting
        own = [self._blocks(f"mtp.{stage}.", blocks)[rank] for stage in range(DSPARK_STAGES)]
        stages = [pack_layer([block], config, shapes, kind="swa", ratio=0)[0] for block in own]
        return pack_draft(own[0], own[-1], stages, config, shapes, embed=embed, head=head)

    def _blocks(self, prefix: str, blocks: _Blocks) -> list[StoredBlock]:
        """Return each rank's block of tensors, which are read when the first rank asks for them."""
        waiting: list[dict[Names, Tensor]] = [{} for _ in self._devices]

        def take(rank: int, names: Names) -> Tensor:
            if names not in waiting[rank]:
                for own, part in zip(waiting, self._take(tuple(prefix + name for name in names)), strict=True):
                    if part is not None:
                        own[names] = part
            return waiting[rank].pop(names)

        return [StoredBlock(blocks[prefix], partial(take, rank)) for rank in range(len(self._devices))]

    def _take(self, names: Names) -> list[Tensor | None]:
        """Take tensors that are alike; return each rank's part of them, on its device."""
        parts = self._parts.take(names)
        if names[0].startswith("mtp.") and not self._draft_fault:
            self._draft_fault = _not_a_number(names, next(part for part in parts if part is not None))
        if self._meter is not None:
            self._meter.placed(names[-1], *(0 if part is None else part.nbytes for part in parts))
        return parts

    def _pack(self, blocks: Sequence[StoredBlock], number: int) -> list[RankLayer]:
        config = rank_config(self._config, self._placement.shares)
        try:
            return pack_layer(
                blocks, config, self._shapes, kind=config.kind(number), ratio=config.compress_ratios[number]
            )
        except ValueError as error:
            raise CheckpointError(f"layers.{number} cannot be packed: {error}", param=f"layers.{number}") from error


def _parts(
    source: TensorSource | None,
    entries: Mapping[str, Stored],
    batches: Sequence[Batch],
    placement: Placement,
    devices: Sequence[torch.device],
) -> Parts:
    if source is not None:
        return MadeParts(source, placement, devices)
    in_files = {name: entry for name, entry in entries.items() if isinstance(entry, TensorEntry)}
    return FileParts(in_files, batches, devices)


def _by_block(entries: Mapping[str, Stored]) -> _Blocks:
    blocks: dict[str, set[str]] = {"": set()}
    for name in entries:
        stack, _, rest = name.partition(".")
        number, _, inside = rest.partition(".")
        if stack in ("layers", "mtp"):
            blocks.setdefault(f"{stack}.{number}.", set()).add(inside)
        else:
            blocks[""].add(name)
    return blocks


def _not_a_number(names: Names, stacked: Tensor) -> str:
    """Say which of some tensors is not finite, "" when all are."""
    if not not_a_number(names[0], stacked):
        return ""
    return next(filter(None, (not_a_number(name, one) for name, one in zip(names, stacked, strict=True))))
