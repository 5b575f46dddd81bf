"""A chunk of rows on the FP8 matrices of V4-Flash: as one GPU of a pair holds them, and whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import _chunk_lanes, fp8_chunk
from dsv4nb_kernels._chunk_rows import ChunkRows, column_order
from dsv4nb_kernels._e8m0 import scales_of
from dsv4nb_kernels._round_chunk import round_chunk
from dsv4nb_kernels.bench._driver import Arm, Launch, random_words, require_close
from dsv4nb_kernels.fp8_chunk import Tuning
from dsv4nb_kernels.fp8_rows import Fp8Matrix, unpack

OP = "fp8_chunk"
ROWS = 2048
# N, K, groups
SHAPES = {
    "q_b half": (16384, 1024, 1),
    "o_b half": (4096, 4096, 1),
    "o_a half": (4096, 4096, 4),
    "q_a, kv": (1536, 4096, 1),
    "index q_b": (8192, 1024, 1),
    "q_b": (32768, 1024, 1),
    "o_b": (4096, 8192, 1),
}
CUTS = (Tuning(rows=1, columns=2), Tuning(rows=2, columns=1), Tuning(rows=1, columns=1))
LIMIT = 1e-6  # before the result is rounded
CHECKED = 192  # rows


def arms(device: torch.device) -> list[Arm]:
    """Return the product's cut on every shape, other cuts, and the peers."""
    return [arm for name in SHAPES for arm in (*_own(device, name), *_peers(device, name))]


def _own(device: torch.device, name: str) -> Iterator[Arm]:
    n, k, groups = SHAPES[name]

    for cut in CUTS:
        yield Arm(
            op=OP,
            shape=name,
            rows=ROWS,
            name=str(cut),
            bytes_read=n * k,
            flop=2.0 * ROWS * n * k,
            make=partial(_make, device, n, k, groups, cut),
            compile=partial(_compile, n, k, groups, cut),
            check=partial(_check, device, n, k, groups, cut),
            is_product=cut == fp8_chunk.tuning(n, k),
        )


def _compile(n: int, k: int, groups: int, cut: Tuning) -> None:
    fp8_chunk._fp8_chunk_lanes_kernel.warmup(
        torch.int32, torch.float32, torch.float16, torch.float32, torch.float32, 1, grid=(1,),
        **fp8_chunk.lane_constants(n, k, groups, cut), num_warps=_chunk_lanes.WARPS,
    )  # fmt: skip


def matrices(device: torch.device, n: int, k: int, count: int) -> list[Fp8Matrix]:
    """Return random codes without NaN, every e8m0 byte near that of real weights."""
    words = random_words(device, count * n * k // 4, ~0x40404040).view(count, -1)
    scale_bytes = random_words(device, count * (n // 128) * (k // 128)).remainder(16).add(112).to(torch.uint8)
    scales = scales_of(scale_bytes).view(count, n // 128, k // 128)
    return [Fp8Matrix(words=words[i], scales=scales[i], n=n, k=k) for i in range(count)]


def chunk_rows(device: torch.device, rows: int, width: int) -> ChunkRows:
    """Return random rounded rows whose blocks of 128 differ by up to 2^4."""
    generator = torch.Generator(device).manual_seed(rows)
    x = torch.randn(rows, width // 128, 128, device=device, generator=generator)
    sizes = torch.randint(-2, 3, (rows, width // 128, 1), generator=generator, device=device)
    return round_chunk((x * torch.exp2(sizes.float())).flatten(1).bfloat16(), act_fp8=True)


def _make(device: torch.device, n: int, k: int, groups: int, cut: Tuning, count: int) -> Launch:
    weights, x = matrices(device, n, k, count), chunk_rows(device, ROWS, groups * k)
    out = torch.empty(1, ROWS, n, device=device)
    return lambda i: fp8_chunk.launch(x, weights[i % count], cut, groups=groups, out=out)


def matrix_values(matrix: Fp8Matrix) -> Tensor:
    """Return the float64 values of a matrix."""
    codes, scale_bytes = unpack(matrix)
    return codes.double() * scales_of(scale_bytes).double().repeat_interleave(128, 0).repeat_interleave(128, 1)


def row_values(x: ChunkRows) -> Tensor:
    """Return the float64 values of arranged rows, their columns in order."""
    columns = column_order(x.values.shape[1]).argsort().to(x.values.device)
    return x.values[:, columns].double() * x.scales.double()[:, None]


def _check(device: torch.device, n: int, k: int, groups: int, cut: Tuning) -> None:
    matrix, x = matrices(device, n, k, 1)[0], chunk_rows(device, CHECKED, groups * k)
    out = fp8_chunk.launch(x, matrix, cut, groups=groups)
    rows, weights = row_values(x).view(CHECKED, groups, k), matrix_values(matrix).view(groups, -1, k)
    require_close(out[0], torch.einsum("tgk,gnk->tgn", rows, weights).flatten(1), LIMIT)


def _peers(device: torch.device, name: str) -> Iterator[Arm]:
    n, k, groups = SHAPES[name]
    forms: dict[str, Callable[..., Launch]] = {
        "torch._scaled_mm, one scale": _scaled_mm_whole,
        "torch._scaled_mm, blocks": _scaled_mm_blocks,
        "torch.mm, bfloat16": _mm,
    }
    for label, form in forms.items():
        if groups == 1:
            yield Arm(
                op=OP,
                shape=name,
                rows=ROWS,
                name=label,
                bytes_read=n * k,
                flop=2.0 * ROWS * n * k,
                make=partial(form, device, n, k),
                is_peer=True,
            )


def _codes(device: torch.device, n: int, k: int, count: int) -> Tensor:
    words = random_words(device, count * n * k // 4, ~0x40404040)
    return words.view(torch.float8_e4m3fn).view(count, n, k)


def _scaled_mm_whole(device: torch.device, n: int, k: int, count: int) -> Launch:
    weights, x = _codes(device, n, k, count), _codes(device, ROWS, k, 1)[0]
    one = torch.ones((), device=device)

    def launch(i: int) -> Tensor:
        return torch._scaled_mm(x, weights[i % count].t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return launch


def _scaled_mm_blocks(device: torch.device, n: int, k: int, count: int) -> Launch:
    weights, x = _codes(device, n, k, count), _codes(device, ROWS, k, 1)[0]
    x_scales = torch.ones(k // 128, ROWS, device=device).t()
    w_scales = torch.ones(n // 128, k // 128, device=device).t()

    def launch(i: int) -> Tensor:
        return torch._scaled_mm(x, weights[i % count].t(), x_scales, w_scales, out_dtype=torch.bfloat16)

    return launch


def _mm(device: torch.device, n: int, k: int, count: int) -> Launch:
    weights = random_words(device, count * n * k // 2, ~0x40004000).view(torch.bfloat16).view(count, n, k)
    x = torch.randn(ROWS, k, device=device).bfloat16()
    out = torch.empty(ROWS, n, dtype=torch.bfloat16, device=device)
    return lambda i: torch.mm(x, weights[i % count].t(), out=out)
