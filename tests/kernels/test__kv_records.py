"""Records of key/value rows: the layout (M-28: what they stand for is the simulated rounding), and the kernels."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels import _kv_records as kernel
from dsv4nb_kernels._kv_records import Unpacked
from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference._records import pack_records, unpack_records

SHAPES = [(512, 64), (256, 64), (128, 64), (256, 128)]


def simulated(rows: Tensor, tail: int) -> Tensor:
    """What a cache without records holds: [T, hd] bfloat16."""
    plain = rows.shape[1] - tail
    return torch.cat((round_fp8(rows[:, :plain], 64), rows[:, plain:]), 1).bfloat16()


def draw_rows(rows: int, width: int) -> Tensor:
    """[T, hd] of bfloat16's values: rows of all sizes, blocks of nothing, of almost nothing, of one large element."""
    generator = torch.Generator().manual_seed(rows + width)
    size = torch.exp2(torch.linspace(-30, 60, rows))[:, None]
    out = torch.randn(rows, width, generator=generator) * size
    out[0, :64] = 0.0
    out[1 % rows, :64] *= 1e-9
    out[2 % rows, :63] *= 1e-3
    out[:, -1] = -0.0
    return out.bfloat16().float()


def all_scaled_bfloat16s(tail: int) -> Tensor:
    """Every finite bfloat16 that is not too large to round, each as the largest of its block and as the second."""
    values = torch.arange(0x7F00, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    rows = torch.zeros(len(values), 128 + tail)
    rows[:, 0], rows[:, 64], rows[:, 65] = values, -values, values * 1.96875
    return rows.bfloat16().float()


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether two are equal, the sign of a zero aside: a rounding by addition has no negative one."""
    return found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize(("width", "tail"), SHAPES)
def test_a_record_stands_for_the_simulated_rounding(width: int, tail: int) -> None:
    rows = draw_rows(40, width)
    records = pack_records(rows, tail)
    assert records.shape == (40, kernel.record_bytes(width, tail)) and records.dtype == torch.uint8
    assert same_bits(unpack_records(records, width, tail), simulated(rows, tail))


def test_every_bfloat16_is_kept_as_the_rounding_leaves_it() -> None:
    rows = all_scaled_bfloat16s(64)
    assert same_bits(unpack_records(pack_records(rows, 64), 192, 64), simulated(rows, 64))


def test_the_layout() -> None:
    assert [kernel.record_bytes(*shape) for shape in SHAPES] == [592, 336, 208, 400]
    rows = torch.zeros(1, 512)
    rows[0, :4] = torch.tensor([448.0, -1.0, 0.01, -0.0001])
    rows[0, 64] = 3.0
    rows[0, -1] = 1.0
    record = pack_records(rows, 64)[0]
    assert record[:4].tolist() == [0x7E, 0xB8, 0x05, 0x00]  # 0.01 is five steps of 2^-9
    assert record[64] == 0x7C  # 3 under 2^-7 is 384
    assert record[448:574].sum() == 0 and record[574:576].tolist() == [0x80, 0x3F]
    floor = 127 + math.ceil(math.log2(1e-4 / 448))
    assert record[576:].tolist() == [127, 120, *[floor] * 5, *[0] * 9]
    assert not unpack_records(torch.zeros(3, 592, dtype=torch.uint8), 512, 64).any()


@triton.jit
def _pack_kernel(rows_ptr, records_ptr, RECORD: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    i_row = tl.program_id(0)
    b_x = tl.load(rows_ptr + i_row * WIDTH + tl.arange(0, WIDTH))
    kernel.store_record(records_ptr + i_row * RECORD, b_x, WIDTH, TAIL)


def pack(rows: Tensor, tail: int) -> Tensor:
    """By the kernels' function; holds it to its own bytes."""
    count, width = rows.shape
    size = kernel.record_bytes(width, tail)
    records = torch.full((count + 1, size), 0xA5, dtype=torch.uint8, device=rows.device)
    _pack_kernel[(count,)](rows, records, size, width, tail)
    plain = width - tail
    held = plain + 2 * tail + plain // 64
    assert bool((records[-1] == 0xA5).all()) and bool((records[:, held:] == 0xA5).all())
    records[:, held:] = 0
    return records[:-1]


@pytest.mark.kernels
@pytest.mark.parametrize(("width", "tail"), SHAPES)
def test_kernels_write_and_read_the_same_records(width: int, tail: int, place: torch.device) -> None:
    rows = draw_rows(40, width)
    expected = pack_records(rows, tail)
    records = pack(rows.to(place), tail)
    assert torch.equal(records.cpu(), expected)
    found = torch.full((41, width), torch.nan, dtype=torch.bfloat16, device=place)
    more = torch.full((8, width), torch.nan, dtype=torch.bfloat16, device=place)
    second = Unpacked(records=records[32:].clone(), rows=more)
    kernel.unpack_records(Unpacked(records=records, rows=found[:-1]), second, tail=tail)
    assert same_bits(found[:-1].cpu(), simulated(rows, tail)) and found[-1].isnan().all()
    assert torch.equal(more, found[32:40])
    found[:-1].fill_(torch.nan)
    kernel.unpack_records(Unpacked(records=records, rows=found[:-1]), None, tail=tail)
    assert same_bits(found[:-1].cpu(), simulated(rows, tail)) and found[-1].isnan().all()


@pytest.mark.kernels
def test_the_kernel_refuses_by_name(place: torch.device) -> None:
    records = torch.zeros(4, 208, dtype=torch.uint8, device=place)
    rows = torch.zeros(4, 128, dtype=torch.bfloat16, device=place)
    good = Unpacked(records=records, rows=rows)
    cases = [
        (Unpacked(records=records[:, :192].contiguous(), rows=rows), None, 64, "first.records must have shape"),
        (Unpacked(records=records.to(torch.int8), rows=rows), None, 64, r"first.records must be torch\.uint8"),
        (Unpacked(records=records, rows=rows.float()), None, 64, r"first.rows must be torch\.bfloat16"),
        (good, Unpacked(records=records, rows=rows[:3]), 64, "second.rows must have shape"),
        (good, None, 32, "the tail are multiples of 64"),
        (good, None, 128, "the tail are multiples of 64"),
    ]
    for first, second, tail, named in cases:
        with pytest.raises(ValueError, match=named):
            kernel.unpack_records(first, second, tail=tail)


@pytest.mark.gpu
def test_every_bfloat16_is_kept_by_the_kernels() -> None:
    wide = torch.zeros(0x7F00, 512)
    wide[:, :192] = all_scaled_bfloat16s(64)
    rows = wide.bfloat16().float()
    records = pack(rows.cuda(), 64)
    assert torch.equal(records.cpu(), pack_records(rows, 64))
    found = torch.empty(len(rows), 512, dtype=torch.bfloat16, device="cuda")
    kernel.unpack_records(Unpacked(records=records, rows=found), None, tail=64)
    assert same_bits(found.cpu(), simulated(rows, 64))
