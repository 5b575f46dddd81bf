"""A checkpoint's tensors as float32 under official names, for the whole-sequence networks."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.contract import Contract
from dsv4nb.reference.drafter import DrafterNetwork
from dsv4nb.reference.network import Network
from dsv4nb.weights.packing import unpack_fp4, unpack_fp8
from dsv4nb.weights.reader import Reader


def load_network(checkpoint: Checkpoint, contract: Contract | None = None) -> Network:
    """Build the network of `checkpoint` with frozen parameters; drafter tensors are left out.

    Args:
        contract: the checkpoint's own when None.

    Raises:
        CheckpointError: a tensor has a format this network does not read (NVFP4).
    """
    network = Network(checkpoint.config, contract or checkpoint.contract)
    network.load_official(official_tensors(checkpoint, is_drafter=False))
    return network.requires_grad_(False).eval()


def load_drafter(checkpoint: Checkpoint, trunk: Network, contract: Contract | None = None) -> DrafterNetwork:
    """Build the DSpark drafter of `checkpoint` beside its `trunk`, with frozen parameters; as `load_network`."""
    drafter = DrafterNetwork(trunk, contract or checkpoint.contract)
    drafter.load_official(official_tensors(checkpoint, is_drafter=True))
    return drafter.requires_grad_(False).eval()


def official_tensors(checkpoint: Checkpoint, *, is_drafter: bool) -> dict[str, Tensor]:
    """Read the trunk's tensors, or the drafter's, dequantised.

    Raises:
        CheckpointError: as `load_network`.
    """
    names = [n for n in checkpoint.entries if n.startswith("mtp.") == is_drafter and not n.endswith(".scale")]
    with Reader(checkpoint.entries) as reader:
        return {name: _float32(reader, name) for name in names}


def _float32(reader: Reader, name: str) -> Tensor:
    value = reader.read(name)
    scale = f"{name.removesuffix('weight')}scale"
    if value.dtype == torch.int8:
        return unpack_fp4(value, reader.read(scale))
    if value.dtype == torch.float8_e4m3fn:
        return unpack_fp8(value, reader.read(scale))
    return value if value.dtype == torch.int64 else value.float()
