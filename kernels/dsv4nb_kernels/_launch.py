"""What every launcher checks, and how a kernel is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor

ROWS_MAX = 8  # rows of one step: the token columns of one tensor-core instruction
CHUNK_ROWS_MAX = 4096  # rows of one chunk of a prompt, for kernels that a row passes alone
ALIGNMENT = 16  # bytes of one lane's load
TILE = 16  # rows of a matrix in one instruction
STAGE = 256  # k of eight units: what one activation load of a single row covers


def require(holds: bool, message: str, found: object) -> None:
    """Refuse an argument.

    Raises:
        ValueError: `holds` is false; the message ends with what was found.
    """
    if not holds:
        raise ValueError(f"{message}; got {found}")


def require_tensor(
    tensor: Tensor, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """Refuse a tensor that the kernel would misread.

    Raises:
        ValueError: `tensor` has another shape or dtype, is strided, is elsewhere, or starts off a 16-byte boundary.
    """
    fits = tensor.shape == tuple(shape) and tensor.dtype == dtype and tensor.is_contiguous()
    if fits and (device is None or tensor.device == device) and tensor.data_ptr() % ALIGNMENT == 0:
        return  # before messages are made: a layer of a chunk asks a hundred times
    require(tuple(tensor.shape) == tuple(shape), f"{name} must have shape {tuple(shape)}", tuple(tensor.shape))
    require(tensor.dtype == dtype, f"{name} must be {dtype}", tensor.dtype)
    require(tensor.is_contiguous(), f"{name} must be contiguous", f"strides {tensor.stride()}")
    require(device is None or tensor.device == device, f"{name} must be on {device}", tensor.device)
    require(tensor.data_ptr() % ALIGNMENT == 0, f"{name} must start on a {ALIGNMENT}-byte boundary", tensor.data_ptr())


def require_few(count: int, name: str) -> None:
    """Refuse a tensor whose places do not fit the 32 bits that a kernel counts them in.

    Raises:
        ValueError: it has 2^31 elements or more; take fewer rows at a time.
    """
    require(count < 1 << 31, f"{name} must have fewer than 2^31 elements: take fewer rows at a time", count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a compiled kernel may need, on every GPU that the engine knows; a test compiles it and compares.

    Attributes:
        registers: per thread.
        stack_bytes: per thread; spilled registers live here.
        shared_bytes: per program.
    """

    registers: int
    stack_bytes: int = 0
    shared_bytes: int = 0


WIDE = 8  # token columns of steps of more than four rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a product is cut; tiles, warps and splits by the matrix alone, because the cut along K fixes the order.

    Attributes:
        tiles: tiles of 16 rows of the matrix in one program.
        warps: warps along K that share a tile.
        splits: programs along K; their sums stay apart for the next kernel.
        depth: chunks of 64 k of weights on their way at a time; the first `depth` before the kernel waits.
        ahead: chunks by which the activations are requested before they are used.
        registers: cap per thread, None for the assembler's choice.
        wide: depth, ahead and registers of steps of more than four rows, where they differ: no sum depends on them.
    """

    tiles: int = 1
    warps: int = 2
    splits: int = 1
    depth: int = 8
    ahead: int = 0
    registers: int | None = None
    wide: tuple[int, int, int | None] | None = None

    def at(self, token_columns: int) -> Tuning:
        """Return the cut of steps of so many token columns."""
        if self.wide is None or token_columns < WIDE:
            return replace(self, wide=None)
        depth, ahead, registers = self.wide
        return replace(self, depth=depth, ahead=ahead, registers=registers, wide=None)

    def __str__(self) -> str:
        cap = "" if self.registers is None else f" r{self.registers}"
        return f"{self.tiles}x{self.warps} s{self.splits} d{self.depth} a{self.ahead}{cap}"


def compiler_options(cut: Tuning, dependent: bool) -> dict[str, int | bool]:
    """Return how Triton compiles a kernel cut so."""
    cap = {} if cut.registers is None else {"maxnreg": cut.registers}
    return {"num_warps": cut.tiles * cut.warps, "launch_pdl": dependent, **cap}


def require_cut(cut: Tuning, n: int, k: int, groups: int = 1) -> None:
    """Refuse a cut that does not fit an [n, k] matrix of `groups` groups of rows.

    Raises:
        ValueError: a warp would not get whole stages of 256 k, or a program not whole tiles of one group.
    """
    require(k % (STAGE * cut.warps * cut.splits) == 0, f"K must be a multiple of {STAGE} for every warp of {cut}", k)
    whole = groups * TILE * cut.tiles
    require(groups > 0 and n % whole == 0, f"N must be a multiple of {groups} groups times the tiles of {cut}", n)


def columns(rows: int) -> int:
    """Return how many of the eight token columns differ: `rows` rounded up to 1, 2, 4 or 8."""
    return power_of_two(rows)


def cdiv(count: int, size: int) -> int:
    """Return how many pieces of `size` hold `count`: Triton's, called on the host, takes some microseconds."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """Return the first power of two that is not below `count`, 1 or more; likewise."""
    return 1 << (count - 1).bit_length()


@cache
def runs_ptx(device: torch.device) -> bool:
    """Return whether kernels on `device` may hold inline PTX: the interpreter and older GPUs take the plain form."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def runs_wgmma(device: torch.device) -> bool:
    """Return whether kernels on `device` may use Hopper's warpgroup products."""
    return runs_ptx(device) and torch.cuda.get_device_capability(device)[0] == 9
