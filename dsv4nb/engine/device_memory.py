"""What an engine's caches take on its GPUs, and how much longer a sequence its GPUs have room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from dsv4nb.engine.cache import Part, layer_shape
from dsv4nb.engine.device_caches import Share, device_state_bytes
from dsv4nb.engine.device_state import DeviceSnapshot, DeviceState, Shelf
from dsv4nb.engine.free_memory import free_host_bytes, largest_session
from dsv4nb.engine.memory import CLASSES, ClassBytes, DeviceBytes

# torch gives large tensors whole units of memory, and smaller ones shares of a segment
UNIT_BYTES, SEGMENT_BYTES = 2 << 20, 20 << 20


def largest_state(shelf: Shelf) -> int:
    """Return the most positions of one more state in what the GPUs have free; what nobody holds of caches is free."""
    return min(_largest_on(device, shelf) for device in {share.device for share in shelf.shares})


def _largest_on(device: torch.device, shelf: Shelf) -> int:
    shares = [share for share in shelf.shares if share.device == device]

    def state_bytes(positions: int) -> dict[str, int]:
        size = shelf.size_of(positions)
        return {str(number): sum(bytes_on(share, shelf, size).values()) for number, share in enumerate(shares)}

    idle = sum(sum(state_bytes(positions).values()) for positions in shelf.idle())
    lost = sum(lost_bytes(share, shelf) for share in shares) if device.type == "cuda" else 0
    return largest_session(state_bytes, shelf.max_seq, free_bytes(device) + idle - lost)


def lost_bytes(share: Share, shelf: Shelf) -> int:
    """Return what a state may take on a GPU beside its tensors, since torch hands memory out in units."""
    shapes = [layer_shape(shelf.config, layer) for layer in share.layers]
    tensors = sum(1 + 2 * (shape.compressor is not None) + 2 * (shape.indexer is not None) for shape in shapes)
    return SEGMENT_BYTES + UNIT_BYTES * tensors


def free_bytes(device: torch.device) -> int:
    """Return the memory of a device that a process can take, torch's own reserve included."""
    if device.type != "cuda":
        return free_host_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def bytes_on(share: Share, shelf: Shelf, positions: int) -> dict[str, int]:
    """Return what caches of so many positions take on one GPU, by class."""
    return device_state_bytes(
        shelf.config, positions, kv_fp8=share.kv_fp8, has_drafter=share.has_drafter, layers=share.layers
    )


def with_shared(counted: Sequence[DeviceBytes], name: str, nbytes: Sequence[int]) -> tuple[DeviceBytes, ...]:
    """Return the same with a class of memory that no state holds, of which each device has so much."""
    return tuple(
        replace(one, classes={**one.classes, name: ClassBytes(used=0, reserved=own)})
        for one, own in zip(counted, nbytes, strict=True)
    )


def count(share: Share, shelf: Shelf, states: list[DeviceState], snapshots: list[DeviceSnapshot]) -> DeviceBytes:
    """Return what caches and copies take on one GPU, by class; states are counted as far as they are filled."""
    used = dict.fromkeys(CLASSES if share.has_drafter else CLASSES[:-1], 0)
    copied = dict(used)
    bytes_of = partial(bytes_on, share, shelf)
    for state in states:
        if not state.is_released:
            for name, nbytes in bytes_of(state.pos).items():
                used[name] += nbytes
    for snapshot in snapshots:
        for part, rows in snapshot.parts:
            if shelf.home(part) is share:
                copied[_class_of(part)] += rows.nbytes
    reserved = dict(copied)
    for positions, made in tuple(shelf.made.items()):
        for name, nbytes in bytes_of(positions).items():
            reserved[name] += made * nbytes
    return DeviceBytes(
        device=str(share.device),
        classes={name: ClassBytes(used=used[name] + copied[name], reserved=reserved[name]) for name in used},
    )


def _class_of(part: Part) -> str:
    """Return the class of cache that a copy is counted with."""
    of_layer, kind, *leaf = part.name.split(".")
    return "drafter" if of_layer == "mtp" else "source" if leaf == ["source"] else kind
