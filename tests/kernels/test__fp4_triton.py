"""FP4 in the lanes' order: packing, and the product of one block in every form."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb.weights.packing import unpack_fp4 as decode
from dsv4nb_kernels._fp4 import (
    add_fp4_unit,
    add_fp4_unit_plainly,
    pack_fp4,
    unpack_fp4,
)
from dsv4nb_kernels._fp4_arrange import arrange_fp4
from dsv4nb_kernels._lanes import KEEP, load_lanes
from dsv4nb_kernels._reduce import no_chains, sum_chains

pytestmark = pytest.mark.kernels


def draw(n: int, k: int, last_byte: int = 240) -> tuple[Tensor, Tensor]:
    """Every pair of codes, and every scale byte up to `last_byte` in turn."""
    codes = torch.randint(0, 256, (n, k // 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    scale_bytes = (torch.arange(n * (k // 32)) % (last_byte + 1)).to(torch.uint8).view(n, k // 32)
    return codes, scale_bytes


@pytest.mark.parametrize("shape", [(16, 256), (48, 512), (256, 1024)], ids=str)
def test_packing_keeps_the_checkpoint(shape: tuple[int, int]) -> None:
    codes, scale_bytes = draw(*shape)
    words = pack_fp4(codes, scale_bytes)
    assert words.shape == (shape[0] // 16, shape[1] // 256, 544) and words.dtype == torch.int32
    again, again_bytes = unpack_fp4(words)
    assert torch.equal(again, codes) and torch.equal(again_bytes, scale_bytes)
    assert torch.equal(pack_fp4(codes.view(torch.int8), scale_bytes), words)


@pytest.mark.parametrize("shape", [(16, 256), (48, 512), (32, 2048)], ids=str)
def test_packing_in_one_pass_gives_the_same_words(shape: tuple[int, int]) -> None:
    codes, scale_bytes = draw(*shape)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where the interpreter runs it
    words = arrange_fp4(codes.to(device), scale_bytes.to(device))
    assert torch.equal(words.cpu(), pack_fp4(codes, scale_bytes))


@pytest.mark.parametrize("byte", [241, 254, 255])
def test_refuses_scale_bytes_that_the_bias_would_overflow(byte: int) -> None:
    codes, scale_bytes = draw(16, 256)
    scale_bytes[3, 5] = byte
    with pytest.raises(ValueError, match=f"scale_bytes.*240.*got {byte}"):
        pack_fp4(codes, scale_bytes)


def test_refuses_shapes_by_name() -> None:
    codes, scale_bytes = draw(16, 256)
    for bad_codes, bad_bytes, name in [
        (codes[:8], scale_bytes[:8], "multiple of 16 rows"),
        (codes[:, :64], scale_bytes[:, :4], "multiple of 256 columns"),
        (codes, scale_bytes[:, :4].contiguous(), "scale_bytes must have shape"),
        (codes, scale_bytes.float(), "scale_bytes must be torch.uint8"),
        (codes.float(), scale_bytes, r"\[N, K/2\] bytes"),
    ]:
        with pytest.raises(ValueError, match=name):
            pack_fp4(bad_codes, bad_bytes)


@triton.jit
def _block_kernel(
    words_ptr,  # [544] int32, one block
    x_ptr,  # [P, 8, 8, 32] float16: unit, token, k
    out_ptr,  # [P, 8, 16] float32
    PTX: tl.constexpr,
):
    """The product of a block with eight tokens, by one warp."""
    i_program = tl.program_id(0)
    o_thread = tl.arange(0, 32)
    o_g = o_thread // 4
    o_t = o_thread % 4
    acc = no_chains(32, 8)
    if PTX:
        p_w = words_ptr.to(tl.int64) + o_thread * 16
        w = load_lanes(p_w, 4, 512, KEEP)
        s = load_lanes(words_ptr.to(tl.int64) + 2048 + o_g * 16, 1, 16, KEEP)
        x = load_lanes(x_ptr.to(tl.int64) + i_program * 4096 + o_thread * 16, 8, 512, KEEP)
        for u in tl.static_range(8):
            acc = add_fp4_unit(acc, w, s, x, o_t, u, 8)
    else:
        p_block = words_ptr.to(tl.pointer_type(tl.uint8))
        p_x = x_ptr + i_program * 2048 + o_t * 64
        for u in tl.static_range(8):
            p_even = p_x + u * 256
            acc = add_fp4_unit_plainly(acc, p_block + o_g * 64, p_block + 2048 + o_g * 16, p_even, p_even + 32, u)
    acc = sum_chains(acc, 8)
    p_out = out_ptr + i_program * 128 + o_t * 32 + o_g
    tl.store(p_out, acc[0])
    tl.store(p_out + 16, acc[1])
    tl.store(p_out + 8, acc[2])
    tl.store(p_out + 24, acc[3])


def columns_of(words: Tensor, ptx: bool) -> Tensor:
    """Read a block's [16, 256] values through the kernel: token i of program p is one at column 8p + i."""
    x = torch.zeros(32, 8, 8, 32, dtype=torch.float16)
    for k in range(256):
        x[k // 8, k // 32, k % 8, k % 32] = 1.0
    out = torch.empty(32, 8, 16, device=words.device)
    _block_kernel[(32,)](words, x.to(words.device), out, PTX=ptx, num_warps=1)
    return out.view(256, 16).t()


def test_every_code_and_every_scale_is_exact(form: Any) -> None:
    codes, scale_bytes = draw(32, 256)  # 256 groups: every byte from 0 to 240
    words = pack_fp4(codes, scale_bytes).to(form.device)
    for tile in range(2):
        rows = slice(16 * tile, 16 * tile + 16)
        assert torch.equal(columns_of(words[tile, 0], form.ptx).cpu(), decode(codes[rows], scale_bytes[rows]))
