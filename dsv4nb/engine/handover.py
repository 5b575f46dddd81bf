"""What a span of layers leaves of T rows for the span behind it, on the next GPU.

The last sublayer's output goes along unmixed: the next span's first boundary mixes it in, as it would on one GPU, so a
row has the same bits however the layers are cut. All of it lies in one piece of memory, and one copy takes it across.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine.cache import tap_width
from dsv4nb_kernels.hyper_mix import STREAMS, Boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Room for T rows between two spans, R of them tapped.

    Attributes:
        whole: [N] uint8, all of the others.
        y: [1, T, D] float32, the last sublayer's output, which the streams still lack.
        stream: [T, HC, D] bfloat16; post: [T, HC], comb: [T, HC, HC], float32: of the boundary before that sublayer.
        taps: [R, K·D] bfloat16, what was tapped so far; None without a drafter.
    """

    whole: Tensor
    y: Tensor
    stream: Tensor
    post: Tensor
    comb: Tensor
    taps: Tensor | None

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, device: torch.device, *, has_taps: bool) -> Handover:
        """Return room on `device`, where every row is tapped or none is."""
        tapped = rows if has_taps else 0
        whole = torch.zeros(handover_bytes(config, rows, tapped=tapped), dtype=torch.uint8, device=device)
        return cls.within(whole, config, rows, tapped=tapped)

    @classmethod
    def within(cls, whole: Tensor, config: ModelConfig, rows: int, *, tapped: int) -> Handover:
        """Return room in `whole`, which has as many bytes as `handover_bytes` says."""
        pieces = _pieces(config, rows, tapped)
        cut = whole.split([_bytes_of(*piece) for piece in pieces.values()])
        made = {
            name: part.view(dtype).view(shape) for (name, (dtype, shape)), part in zip(pieces.items(), cut, strict=True)
        }
        return cls(whole=whole, taps=made.pop("taps", None), **made)

    def leave(self, y: Tensor, boundary: Boundary, taps: Tensor | None) -> None:
        """Launch what puts the rows in, at the end of a span."""
        self.y.copy_(y)
        for own, left in ((self.stream, boundary.stream), (self.post, boundary.post), (self.comb, boundary.comb)):
            own.copy_(left)
        if self.taps is not None and taps is not None:
            self.taps.copy_(taps)

    def enter(self, boundary: Boundary, taps: Tensor | None) -> Tensor:
        """Launch what takes the rows out, at the begin of a span; return y, which is not moved."""
        for own, left in ((self.stream, boundary.stream), (self.post, boundary.post), (self.comb, boundary.comb)):
            left.copy_(own)
        if self.taps is not None and taps is not None:
            taps.copy_(self.taps)
        return self.y


def handover_bytes(config: ModelConfig, rows: int, *, tapped: int) -> int:
    """Return the bytes of room for `rows` rows, `tapped` of them tapped."""
    return sum(_bytes_of(*piece) for piece in _pieces(config, rows, tapped).values())


_Piece = tuple[torch.dtype, tuple[int, ...]]


def _pieces(config: ModelConfig, rows: int, tapped: int) -> dict[str, _Piece]:
    """Name what lies in a handover, one behind the other; each begins on a 16-byte boundary."""
    width = config.hidden_size
    pieces: dict[str, _Piece] = {
        "y": (torch.float32, (1, rows, width)),
        "post": (torch.float32, (rows, STREAMS)),
        "comb": (torch.float32, (rows, STREAMS, STREAMS)),
        "stream": (torch.bfloat16, (rows, STREAMS, width)),
    }
    if tapped:
        pieces["taps"] = (torch.bfloat16, (tapped, tap_width(config)))
    return pieces


def _bytes_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)
