"""A checkpoint's tensors as float32 under official names, for the whole-sequence network."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.contract import Contract
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
    with Reader(checkpoint.entries) as reader:
        names = [n for n in checkpoint.entries if not n.startswith("mtp.") and not n.endswith(".scale")]
        network.load_official({name: _float32(reader, name) for name in names})
    return network.requires_grad_(False).eval()


def _float32(reader: Reader, name: str) -> Tensor:
    value = reader.read(name)
    scale = f"{name.removesuffix('weight')}scale"
    if value.dtype == torch.int8:
        return unpack_fp4(value, reader.read(scale))
    if value.dtype == torch.float8_e4m3fn:
        return unpack_fp8(value, reader.read(scale))
    return value if value.dtype == torch.int64 else value.float()
