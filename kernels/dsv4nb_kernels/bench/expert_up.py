"""The experts' upper halves of V4-Flash: whole, and as one GPU of a pair holds them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dsv4nb_kernels import expert_up
from dsv4nb_kernels._expert_rows import ExpertRows, round_rows
from dsv4nb_kernels._expert_weights import UpWeights
from dsv4nb_kernels._fp4 import WORDS, unpack_fp4
from dsv4nb_kernels._launch import columns
from dsv4nb_kernels.bench._driver import Arm, Launch, random_words, require_close
from dsv4nb_kernels.fp8_rows import Fp8Matrix, unpack
from dsv4nb_kernels.reference.expert_up import clamped_swiglu

OP = "expert_up"
HIDDEN, EXPERTS, CHOICES, LIMIT = 4096, 256, 6, 10.0
INNER = {"half": 1024, "whole": 2048}
# T -> experts of its rows together: routes drawn independently, and as real text was seen to share them
INDEPENDENT = {1: 6, 2: 12, 4: 23, 6: 34}
PROBLEMS = {
    "half": ("half", INDEPENDENT),
    "half, 30": ("half", {6: 30}),
    "half, alike": ("half", {2: 10, 4: 16, 6: 20}),
    "whole": ("whole", INDEPENDENT),
}
SWEPT_ROWS = (1, 6)
SWEPT = (("half", 1), ("half, 30", 6))
# warps, depth, cap of registers, columns of few rows for experts of few rows; the most promising first
CUTS = (
    (4, 1, 80, True),
    (4, 2, 96, True),
    (4, 1, 72, False),
    (4, 2, 80, True),
    (4, 4, 128, True),
    (4, 1, 96, True),
    (4, 2, 72, True),
    (4, 1, 64, True),
    (4, 1, 80, False),
    (2, 2, 96, True),
    (2, 3, 128, True),
    (8, 2, 80, True),
    (4, 3, 112, True),
)
UNROUNDED = 1e-6

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def arms(device: torch.device) -> list[Arm]:
    """Return the product's cut on every problem, the other cuts at T = 1 and 6, and the peers."""
    return [
        arm
        for shape, (size, unions) in PROBLEMS.items()
        for rows, distinct in unions.items()
        for arm in (*_own(device, shape, size, rows, distinct), *_peers(device, shape, size, rows, distinct))
    ]


def _own(device: torch.device, shape: str, size: str, rows: int, distinct: int) -> Iterator[Arm]:
    inner = INNER[size]
    product = expert_up.tuning(HIDDEN, inner)

    def arm(cut: expert_up.Tuning, label: str, dependent: bool = True, older: bool = False) -> Arm:
        return Arm(
            op=OP,
            shape=shape,
            rows=rows,
            name=label,
            bytes_read=bytes_read(inner, distinct),
            make=partial(_make, device, inner, rows, distinct, cut, dependent, older),
            compile=partial(compile_up, inner, cut, rows, dependent, older),
            check=partial(_check, device, inner, rows, distinct, cut),
            is_product=label == str(product),
        )

    yield arm(product, str(product))
    yield arm(product, f"{product}, rows older", older=True)
    if (shape, rows) in SWEPT:
        cuts = [expert_up.Tuning(warps=w, depth=d, registers=r, few=few) for w, d, r, few in CUTS]
        yield from (arm(cut, str(cut)) for cut in cuts if cut != product)
        yield arm(product, "not dependent", dependent=False)
    else:
        every = replace(product, few=False)
        yield arm(every, str(every))


def bytes_read(inner: int, distinct: int) -> int:
    """Return the codes and scales of `distinct` experts' upper halves and of the shared one's."""
    routed = 2 * inner * HIDDEN // 2 + 2 * inner * HIDDEN // 32
    return distinct * routed + 2 * inner * HIDDEN + 4 * (2 * inner // 128) * (HIDDEN // 128)


def compile_up(inner: int, cut: expert_up.Tuning, rows: int, dependent: bool, older: bool) -> None:
    """Fill Triton's cache."""
    expert_up._expert_up_kernel.warmup(
        torch.int32,
        torch.int32,
        torch.float32,
        torch.float16,
        torch.float32,
        torch.int32,
        torch.float32,
        torch.float32,
        1,
        LIMIT,
        0,
        grid=(1,),
        **expert_up.constants(HIDDEN, inner, CHOICES, cut, columns(rows), dependent, older),
        **expert_up.options(cut, dependent),
    )


@functools.cache
def routed_words(device: torch.device, n: int, k: int) -> Tensor:
    """Return [E, N/16, K/256, 544] random codes with scales from 2^-9 to 2^-5."""
    generator = torch.Generator(device).manual_seed(0)
    words = torch.empty(EXPERTS, n // 16, k // 256, WORDS, dtype=torch.int32, device=device)
    words.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
    scale_bytes = torch.randint(
        118 + 14, 123 + 14, (*words.shape[:3], 128), generator=generator, dtype=torch.uint8, device=device
    )
    words[..., 512:] = scale_bytes.view(torch.int32)
    return words


def shared_matrices(device: torch.device, n: int, k: int, count: int) -> list[Fp8Matrix]:
    """Return `count` random matrices without NaN."""
    words = random_words(device, count * n * k // 4, ~0x40404040).view(count, -1)
    scales = torch.exp2(random_words(device, n // 128 * (k // 128)).remainder(8).sub(12).float()).view(n // 128, -1)
    return [Fp8Matrix(words=words[i], scales=scales, n=n, k=k) for i in range(count)]


@functools.cache
def routes(device: torch.device, rows: int, distinct: int, count: int) -> list[Tensor]:
    """Return `count` times [T, K] int32 choices that name exactly `distinct` experts, other ones in turn."""
    generator = torch.Generator().manual_seed(rows * 100 + distinct)
    order = torch.randperm(EXPERTS, generator=generator)
    drawn = []
    for i in range(count):
        pool = order.roll(-i * distinct)[:distinct].tolist()
        chosen: list[set[int]] = [set(pool[row::rows]) for row in range(rows)]
        for row in chosen:
            spare = [e for e in pool if e not in row]
            more = torch.randperm(len(spare), generator=generator)[: CHOICES - len(row)].tolist()
            row.update(spare[j] for j in more)
        drawn.append([sorted(row) for row in chosen])
    return [torch.tensor(turn, dtype=torch.int32, device=device) for turn in drawn]


@functools.cache
def _step(device: torch.device, rows: int) -> tuple[ExpertRows, Tensor]:
    generator = torch.Generator(device).manual_seed(rows)
    x = torch.randn(rows, HIDDEN, device=device, generator=generator)
    return round_rows(x), torch.rand(rows, CHOICES, device=device, generator=generator) + 0.1


def up_launch(
    device: torch.device,
    inner: int,
    rows: int,
    distinct: int,
    cut: expert_up.Tuning,
    dependent: bool,
    older: bool,
    count: int,
) -> tuple[Launch, Tensor]:
    """Return the launch and the lines that it writes."""
    routed = routed_words(device, 2 * inner, HIDDEN)
    shared = shared_matrices(device, 2 * inner, HIDDEN, count)
    weights = [UpWeights(routed=routed, shared=matrix) for matrix in shared]
    experts, (x, shares) = routes(device, rows, distinct, count), _step(device, rows)
    out = torch.empty(rows * (CHOICES + 1) + 1, inner, device=device)

    def launch(i: int) -> Tensor:
        turn = i % count
        return expert_up.launch(
            x,
            experts[turn],
            shares,
            weights[turn],
            cut,
            limit=LIMIT,
            out=out,
            dependent=dependent,
            rows_are_older=older,
        )

    return launch, out


def _make(
    device: torch.device,
    inner: int,
    rows: int,
    distinct: int,
    cut: expert_up.Tuning,
    dependent: bool,
    older: bool,
    count: int,
) -> Launch:
    return up_launch(device, inner, rows, distinct, cut, dependent, older, count)[0]


def e2m1_values(words: Tensor) -> Tensor:
    """Return the float64 values of packed rows."""
    codes, scale_bytes = unpack_fp4(words)
    pairs = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2).long()
    values = torch.tensor(_E2M1, dtype=torch.float64, device=words.device)[pairs]
    return values * torch.exp2(scale_bytes.double() - 127).repeat_interleave(32, -1)


def e4m3_values(matrix: Fp8Matrix) -> Tensor:
    """Return the float64 values of an FP8 matrix."""
    scales = matrix.scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return unpack(matrix)[0].double() * scales


@functools.cache
def _expected(device: torch.device, inner: int, rows: int, distinct: int) -> Tensor:
    x, shares = _step(device, rows)
    values = x.values.double()[:, :rows].permute(1, 0, 2).flatten(1) * x.scales.double()[:rows, None]
    routed, experts = routed_words(device, 2 * inner, HIDDEN), routes(device, rows, distinct, 1)[0]
    shared = shared_matrices(device, 2 * inner, HIDDEN, 1)[0]
    # tiles of sixteen rows: eight of the gate, eight of the other
    halves = torch.arange(2 * inner, device=device).view(-1, 2, 8).transpose(0, 1).reshape(-1)
    shared_scales = shared.scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    last = clamped_swiglu(values @ (unpack(shared)[0].double()[halves] * shared_scales).t(), LIMIT)
    out = last[:, None].repeat(1, CHOICES + 1, 1)
    for expert in experts.unique().tolist():
        inner_rows = clamped_swiglu(values @ e2m1_values(routed[expert])[halves].t(), LIMIT)
        row, choice = (experts == expert).nonzero(as_tuple=True)
        out[row, choice] = inner_rows[row] * shares[row, choice, None].double()
    return out.flatten(0, 1)


def _check(device: torch.device, inner: int, rows: int, distinct: int, cut: expert_up.Tuning) -> None:
    launch, out = up_launch(device, inner, rows, distinct, cut, False, False, 1)
    launch(0)
    require_close(out[:-1], _expected(device, inner, rows, distinct), UNROUNDED)


def _peers(device: torch.device, shape: str, size: str, rows: int, distinct: int) -> Iterator[Arm]:
    """cuBLAS on the same experts in bfloat16: four times the bytes, all rows with every expert."""
    if rows in SWEPT_ROWS and shape == "half":
        elements = (distinct + 1) * 2 * INNER[size] * HIDDEN
        yield Arm(
            op=OP,
            shape=shape,
            rows=rows,
            name="torch.bmm, bfloat16",
            bytes_read=2 * elements,
            make=partial(_bmm, device, rows, distinct + 1, 2 * INNER[size], HIDDEN),
            is_peer=True,
        )


def _bmm(device: torch.device, rows: int, matrices: int, n: int, k: int, count: int) -> Launch:
    weights = random_words(device, count * matrices * n * k // 2, ~0x40004000).view(torch.bfloat16)
    weights = weights.view(count, matrices, n, k).transpose(2, 3)
    x = torch.randn(matrices, rows, k, device=device).to(torch.bfloat16)
    out = torch.empty(matrices, rows, n, dtype=torch.bfloat16, device=device)

    def launch(i: int) -> Tensor:
        return torch.bmm(x, weights[i % count], out=out)

    return launch
