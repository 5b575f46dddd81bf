"""One layer's experts in the order in which the lanes read them, and back to the checkpoint's bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4nb_kernels import fp8_rows
from dsv4nb_kernels._fp4 import GROUP, pack_fp4, unpack_fp4
from dsv4nb_kernels._launch import require, require_tensor

HALF = 8  # gate rows of a tile; as many up rows follow

Stored = tuple[Tensor, Tensor]  # a checkpoint's codes and e8m0 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class UpWeights:
    """The gate and up projections, w1 and w3.

    Attributes:
        routed: [E, I/8, D/256, 544] int32, see `_fp4`; tile i holds gate rows 8i … 8i + 7, then the same up rows.
        shared: the shared expert's matrix with its rows in the same order; its scales are the gate's, then the up's.
    """

    routed: Tensor
    shared: fp8_rows.Fp8Matrix

    @property
    def hidden(self) -> int:
        """D."""
        return self.shared.k

    @property
    def inner(self) -> int:
        """I."""
        return self.shared.n // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DownWeights:
    """The down projections, w2.

    Attributes:
        routed: [E, D/16, I/256, 544] int32, see `_fp4`.
        shared: the shared expert's matrix.
    """

    routed: Tensor
    shared: fp8_rows.Fp8Matrix

    @property
    def hidden(self) -> int:
        """D."""
        return self.shared.n

    @property
    def inner(self) -> int:
        """I."""
        return self.shared.k


def pack_up(gate: Stored, up: Stored, shared_gate: Stored, shared_up: Stored) -> UpWeights:
    """Reorder a layer's w1 and w3 for `expert_up`.

    Args:
        gate, up: [E, I, D/2] bytes of two codes and [E, I, D/32] uint8 scale bytes of the routed experts.
        shared_gate, shared_up: [I, D] float8_e4m3fn and [I/128, D/128] uint8 scale bytes of the shared expert.

    Raises:
        ValueError: a shape or dtype does not fit, a code is NaN, or a scale byte is above 240.
    """
    routed = pack_routed_up(gate, up)
    inner, hidden = gate[0].shape[1], gate[0].shape[2] * 2
    for name, shared in {"shared_gate": shared_gate, "shared_up": shared_up}.items():
        _require_shared(shared, name, inner, hidden, gate[0].device)
    return UpWeights(routed=routed, shared=pack_shared_up(shared_gate, shared_up))


def pack_routed_up(gate: Stored, up: Stored) -> Tensor:
    """Return `UpWeights.routed` of some experts; arguments and errors are those of `pack_up`."""
    experts, inner, hidden = _require_routed(gate, "gate")
    require(inner % fp8_rows.BLOCK == 0, f"gate must have a multiple of {fp8_rows.BLOCK} rows", inner)
    require(_require_routed(up, "up") == (experts, inner, hidden), "up must be shaped as gate", tuple(up[0].shape))
    words = pack_fp4(_interleave(gate[0], up[0]).flatten(0, 1), _interleave(gate[1], up[1]).flatten(0, 1))
    return words.view(experts, inner // HALF, *words.shape[1:])


def pack_shared_up(gate: Stored, up: Stored) -> fp8_rows.Fp8Matrix:
    """Return `UpWeights.shared`; arguments and errors are those of `pack_up`."""
    rows = _interleave(gate[0].view(torch.uint8), up[0].view(torch.uint8))
    return fp8_rows.pack(rows.view(torch.float8_e4m3fn), torch.cat((gate[1], up[1])))


def unpack_up(weights: UpWeights) -> tuple[Stored, Stored, Stored, Stored]:
    """Return gate, up, shared_gate and shared_up as the checkpoint has them; inverse of `pack_up`."""
    codes, scale_bytes = _unpack_routed(weights.routed)
    shared_codes, shared_bytes = fp8_rows.unpack(weights.shared)
    gate, up = zip(_split(codes), _split(scale_bytes), strict=True)
    shared = [half.contiguous().view(torch.float8_e4m3fn) for half in _split(shared_codes.view(torch.uint8))]
    shared_gate, shared_up = zip(shared, shared_bytes.chunk(2), strict=True)
    return gate, up, shared_gate, shared_up


def pack_down(down: Stored, shared_down: Stored) -> DownWeights:
    """Reorder a layer's w2 for `expert_down`.

    Args:
        down: [E, D, I/2] bytes of two codes and [E, D, I/32] uint8 scale bytes of the routed experts.
        shared_down: [D, I] float8_e4m3fn and [D/128, I/128] uint8 scale bytes of the shared expert.

    Raises:
        ValueError: a shape or dtype does not fit, a code is NaN, or a scale byte is above 240.
    """
    routed = pack_routed_down(down)
    _require_shared(shared_down, "shared_down", down[0].shape[1], down[0].shape[2] * 2, down[0].device)
    return DownWeights(routed=routed, shared=fp8_rows.pack(*shared_down))


def pack_routed_down(down: Stored) -> Tensor:
    """Return `DownWeights.routed` of some experts; arguments and errors are those of `pack_down`."""
    experts, _, _ = _require_routed(down, "down")
    words = pack_fp4(down[0].flatten(0, 1), down[1].flatten(0, 1))
    return words.view(experts, -1, *words.shape[1:])


def unpack_down(weights: DownWeights) -> tuple[Stored, Stored]:
    """Return down and shared_down as the checkpoint has them; inverse of `pack_down`."""
    return _unpack_routed(weights.routed), fp8_rows.unpack(weights.shared)


def _require_routed(stored: Stored, name: str) -> tuple[int, int, int]:
    """Refuse what is no batch of FP4 matrices; return [E, N, K]."""
    codes, scale_bytes = stored
    require(codes.ndim == 3, f"{name} must be [E, N, K/2] bytes", tuple(codes.shape))
    experts, n, k = codes.shape[0], codes.shape[1], codes.shape[2] * 2
    require_tensor(scale_bytes, f"{name} scale bytes", (experts, n, k // GROUP), torch.uint8, codes.device)
    return experts, n, k


def _require_shared(stored: Stored, name: str, n: int, k: int, device: torch.device) -> None:
    block = fp8_rows.BLOCK
    require_tensor(stored[0], name, (n, k), torch.float8_e4m3fn, device)
    require_tensor(stored[1], f"{name} scale bytes", (-(-n // block), k // block), torch.uint8, device)


def _unpack_routed(routed: Tensor) -> Stored:
    codes, scale_bytes = unpack_fp4(routed.flatten(0, 1))
    return codes.unflatten(0, (routed.shape[0], -1)), scale_bytes.unflatten(0, (routed.shape[0], -1))


def _interleave(gate: Tensor, up: Tensor) -> Tensor:
    """[..., I, n] twice -> [..., 2I, n]: eight rows of one, the same eight of the other, and so on."""
    return torch.stack((gate.unflatten(-2, (-1, HALF)), up.unflatten(-2, (-1, HALF))), dim=-3).flatten(-4, -2)


def _split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `_interleave`."""
    gate, up = rows.unflatten(-2, (-1, 2, HALF)).unbind(-3)
    return gate.flatten(-3, -2), up.flatten(-3, -2)
