from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from dsv4nb.weights.packing import (
    e8m0_to_float,
    float_to_e8m0,
    pack_e2m1,
    pack_fp4,
    pack_fp8,
    unpack_e2m1,
    unpack_fp4,
    unpack_fp8,
    unpack_nvfp4,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def bits(x: Tensor) -> Tensor:
    """Bit patterns, so that -0 differs from 0."""
    return x.float().contiguous().view(torch.int32)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def scale_exponent(amax: float, largest: int) -> int:
    """Smallest e with amax <= largest * 2**e, exactly; amax > 0."""
    exponent = math.frexp(amax)[1] - 12
    while Fraction(amax) > largest * Fraction(2) ** exponent:
        exponent += 1
    return exponent


def draw(rows: int, columns: int, seed: int) -> Tensor:
    """Rows of very different size, so that many scales occur."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=g) * 10 ** (torch.rand(rows, 1, generator=g) * 12 - 8)


class TestE8m0:
    def test_is_a_power_of_two_of_the_byte(self) -> None:
        found = e8m0_to_float(torch.arange(255, dtype=torch.uint8))
        assert found.tolist() == [math.ldexp(1.0, b - 127) for b in range(255)]

    def test_bytes_are_reinterpreted_never_converted(self) -> None:
        raw = torch.tensor([120, 127, 129], dtype=torch.uint8)
        typed = raw.view(torch.float8_e8m0fnu)
        assert e8m0_to_float(typed).tolist() == [2.0**-7, 1.0, 4.0]
        # what the trap does: assigning the typed tensor to bytes keeps the numbers, most of which are 0
        assert raw.clone().copy_(typed).tolist() != raw.tolist()
        for dtype in (torch.int8, torch.float32, torch.float8_e4m3fn):
            with pytest.raises(ValueError, match="e8m0 scales are bytes"):
                e8m0_to_float(raw.to(dtype))

    def test_0xff_is_refused_by_name(self) -> None:
        raw = torch.tensor([[127, 255], [255, 0]], dtype=torch.uint8)
        with pytest.raises(ValueError, match=r"layers\.3\.attn\.wkv\.scale holds 2 bytes 0xFF"):
            e8m0_to_float(raw, "layers.3.attn.wkv.scale")
        with pytest.raises(ValueError, match="0xFF"):
            unpack_fp4(torch.zeros(2, 32, dtype=torch.int8), raw)

    def test_survives_the_way_back(self) -> None:
        raw = torch.arange(255, dtype=torch.uint8)
        assert torch.equal(float_to_e8m0(e8m0_to_float(raw)), raw)

    @pytest.mark.parametrize("value", [0.0, -1.0, 3.0, 2.0**-128, math.inf, math.nan, 1.0 + 2**-23])
    def test_only_powers_of_two_can_be_written(self, value: float) -> None:
        with pytest.raises(ValueError, match=r"scale holds .* power of two"):
            float_to_e8m0(torch.tensor([1.0, value]))


class TestFp4:
    def test_the_low_nibble_is_the_even_column(self) -> None:
        assert unpack_e2m1(torch.tensor([0x2D], dtype=torch.uint8)).tolist() == [-3.0, 1.0]

    @pytest.mark.parametrize(
        ("text", "scale", "expected"),
        [
            (
                "21 43 65 87 A9 CB ED 0F",
                127,
                [0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6, 0],
            ),
            (
                "21 43 65 87 A9 CB ED 0F",
                120,
                [x / 128 for x in [0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6, 0]],
            ),
            ("91 7F 08 E2", 129, [2, -2, -24, 24, -0.0, 0, 4, -16]),
        ],
    )
    def test_known_bytes(self, text: str, scale: int, expected: list[float]) -> None:
        data = bytes.fromhex(text) + bytes(16 - len(bytes.fromhex(text)))
        packed = torch.tensor(list(data), dtype=torch.uint8)[None]
        found = unpack_fp4(packed.view(torch.int8), torch.tensor([[scale]], dtype=torch.uint8))
        assert same(found[0, : len(expected)], torch.tensor(expected))
        assert same(found, unpack_fp4(packed, torch.tensor([[scale]], dtype=torch.uint8).view(torch.float8_e8m0fnu)))

    def test_one_scale_covers_32_columns_of_one_row(self) -> None:
        packed = torch.full((2, 32), 0x22, dtype=torch.int8)
        scale = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
        expected = torch.tensor([[1.0] * 32 + [2.0] * 32, [4.0] * 32 + [8.0] * 32])
        assert same(unpack_fp4(packed, scale), expected)

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            (
                [0.1, 0.25, 0.3, -0.75, 1.25, -1.75, 2.5, 3.5, 5.0, -6, 5.9, 0.24999],
                [0, 0, 0.5, -1, 1, -2, 2, 4, 4, -6, 6, 0],
            ),
            ([0.1, -0.7, 1.3, 0.02], [0.125, -0.75, 1.5, 0]),
        ],
    )
    def test_rounds_to_nearest_ties_to_the_even_code(self, values: list[float], expected: list[float]) -> None:
        w = torch.zeros(1, 32)
        w[0, : len(values)] = torch.tensor(values)
        assert unpack_fp4(*pack_fp4(w))[0, : len(values)].tolist() == expected

    def test_the_chosen_code_and_scale_are_the_nearest(self) -> None:
        w = draw(24, 64, seed=1)
        w[0] = torch.randint(-24, 25, (64,), generator=torch.Generator().manual_seed(2)) / 4  # ties
        w[1, 0] = 6 * (1 + 2**-20)  # just does not fit into scale 1
        packed, scale = pack_fp4(w)
        codes = torch.stack((packed.view(torch.uint8) & 0xF, packed.view(torch.uint8) >> 4), -1).flatten(-2)
        for row in range(len(w)):
            for block in range(2):
                xs = w[row, 32 * block : 32 * block + 32].tolist()
                exponent = scale_exponent(max(map(abs, xs)), 6)
                assert scale[row, block].item() == exponent + 127
                for x, code in zip(xs, codes[row, 32 * block :].tolist(), strict=False):
                    v = abs(Fraction(x)) / Fraction(2) ** exponent
                    nearest = min(range(8), key=lambda c: (abs(Fraction(E2M1[c]) - v), c % 2))
                    assert code == nearest + (8 if x < 0 and nearest else 0), (x, exponent)

    def test_frozen_bytes(self) -> None:
        w = (torch.arange(64).reshape(2, 32) * 37 % 101 - 50) / 7
        packed, scale = pack_fp4(w)
        assert bytes(packed.view(torch.uint8).flatten().tolist()).hex() == FP4_BYTES
        assert scale.flatten().tolist() == [128, 128]

    def test_every_code_survives_under_every_scale(self) -> None:
        g = torch.Generator().manual_seed(3)
        # byte 252: 6 * 2**125 is the last that fits into float32
        scale = torch.arange(253, dtype=torch.uint8)[:, None].expand(253, 4).contiguous()
        packed = torch.randint(0, 256, (253, 64), generator=g).to(torch.uint8)
        w = unpack_fp4(packed, scale)
        assert same(unpack_fp4(*pack_fp4(w)), w)

    def test_packing_again_changes_nothing(self) -> None:
        once = unpack_fp4(*pack_fp4(draw(64, 96, seed=4)))
        assert same(unpack_fp4(*pack_fp4(once)), once)
        packed = pack_fp4(once)
        assert all(torch.equal(a, b) for a, b in zip(packed, pack_fp4(unpack_fp4(*packed)), strict=True))

    def test_values_are_exact_in_bfloat16(self) -> None:
        w = unpack_fp4(*pack_fp4(draw(64, 96, seed=5)))
        assert same(w.bfloat16().float(), w)

    def test_zeros_and_tiny_numbers(self) -> None:
        w = torch.zeros(4, 32)
        w[1, 3] = -0.0
        w[2, 0] = 2.0**-120
        w[3, :2] = torch.tensor([1.0, -1e-9])  # rounds to +0, as in the official files
        out = unpack_fp4(*pack_fp4(w))
        assert same(out[:3], w[:3])
        assert not torch.signbit(out[3, 1])

    def test_experts_may_be_stacked(self) -> None:
        w = draw(12, 64, seed=6)
        packed, scale = pack_fp4(w.reshape(3, 4, 64))
        assert packed.shape == (3, 4, 32)
        assert same(unpack_fp4(packed, scale).reshape(12, 64), unpack_fp4(*pack_fp4(w)))

    def test_refuses_what_it_cannot_hold(self) -> None:
        with pytest.raises(ValueError, match="multiple of 32"):
            pack_fp4(torch.zeros(2, 48))
        with pytest.raises(ValueError, match="NaN or infinity"):
            pack_fp4(torch.full((1, 32), math.nan))
        with pytest.raises(ValueError, match="int8 or uint8"):
            unpack_fp4(torch.zeros(1, 16), torch.zeros(1, 1, dtype=torch.uint8))
        with pytest.raises(ValueError, match=r"scale is \(1, 2\); a matrix of \(1, 32\) needs \(1, 1\)"):
            unpack_fp4(torch.zeros(1, 16, dtype=torch.int8), torch.zeros(1, 2, dtype=torch.uint8))

    def test_rounding_is_the_same_without_scales(self) -> None:
        x = torch.tensor([0.25, 0.75, -1.25, -0.0])
        assert same(unpack_e2m1(pack_e2m1(x)), torch.tensor([0.0, 1.0, -1.0, -0.0]))


# the two rows of `test_frozen_bytes`, computed by another implementation
FP4_BYTES = "aed3401cb5d2490dc5513a9dc4502ba6d3491cb5d24a0dc5513b9dc4502ca6d3"


class TestFp8:
    def test_known_rounding(self) -> None:
        w = torch.zeros(1, 128)
        w[0, :5] = torch.tensor([0.011, -0.5, 0.26, 1.0, -2.9])
        codes, scale = pack_fp8(w)
        assert scale.tolist() == [[127 - 7]]
        assert unpack_fp8(codes, scale)[0, :5].tolist() == [0.0107421875, -0.5, 0.25, 1.0, -3.0]

    def test_frozen_bytes(self) -> None:
        w = torch.zeros(1, 128)
        w[0, :8] = torch.tensor([448.0, -448.0, 1.0, 0.07, -3.3, 2.0**-9, 2.0**-11, 0.0])
        codes, scale = pack_fp8(w)
        assert scale.tolist() == [[127]]
        assert codes.view(torch.uint8)[0, :8].tolist() == [0x7E, 0xFE, 0x38, 0x19, 0xC5, 0x01, 0x00, 0x00]

    def test_one_scale_covers_a_tile(self) -> None:
        codes = torch.ones(256, 384).to(torch.float8_e4m3fn)
        scale = torch.tensor([[127, 128, 129], [130, 131, 132]], dtype=torch.uint8)
        w = unpack_fp8(codes, scale)
        assert w[::128, ::128].tolist() == [[1, 2, 4], [8, 16, 32]]
        assert w[127::128, 127::128].tolist() == [[1, 2, 4], [8, 16, 32]]

    def test_scales_are_the_smallest_that_fit_and_codes_the_nearest(self) -> None:
        w = draw(256, 256, seed=7)
        w[0, 0] = 448 * (1 + 2**-20) * w.abs().max().log2().ceil().exp2()
        codes, scale = pack_fp8(w)
        grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        for i in range(2):
            for j in range(2):
                tile = w[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].double()
                exponent = scale_exponent(tile.abs().max().item(), 448)
                assert scale[i, j].item() == exponent + 127
                x = (tile.abs() / 2.0**exponent).flatten()
                # two neighbours of the grid; the even code wins a tie
                above = torch.searchsorted(grid, x).clamp(1, 126)
                below = above - 1
                up, down = grid[above] - x, x - grid[below]
                nearest = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
                found = codes[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].contiguous().view(torch.uint8)
                assert torch.equal((found & 0x7F).flatten().long(), nearest)

    def test_every_code_survives_under_every_scale(self) -> None:
        finite = [b for b in range(256) if b & 0x7F != 0x7F]
        row = torch.tensor((finite * 2)[:256], dtype=torch.uint8)
        for byte in (0, 1, 60, 127, 200, 245):
            codes = row.view(torch.float8_e4m3fn).expand(128, 256).contiguous()
            w = unpack_fp8(codes, torch.full((1, 2), byte, dtype=torch.uint8))
            assert same(unpack_fp8(*pack_fp8(w)), w), byte

    def test_packing_again_changes_nothing(self) -> None:
        once = unpack_fp8(*pack_fp8(draw(200, 300, seed=8)))
        assert same(unpack_fp8(*pack_fp8(once)), once)
        assert same(once.bfloat16().float(), once)

    def test_edge_tiles_may_be_smaller(self) -> None:
        w = draw(200, 130, seed=9)
        codes, scale = pack_fp8(w)
        assert (codes.shape, scale.shape) == ((200, 130), (2, 2))
        whole = torch.zeros(256, 256)
        whole[:200, :130] = w
        assert same(unpack_fp8(codes, scale), unpack_fp8(*pack_fp8(whole))[:200, :130])

    def test_float32_scales_need_be_no_powers_of_two(self) -> None:
        codes = torch.full((128, 128), 2.0).to(torch.float8_e4m3fn)
        assert unpack_fp8(codes, torch.tensor([[0.3]]))[5, 5].item() == torch.tensor(0.3).item() * 2

    def test_an_all_zero_tile_stays_zero(self) -> None:
        w = torch.zeros(128, 256)
        w[:, 128:] = 1.0
        codes, scale = pack_fp8(w)
        assert same(unpack_fp8(codes, scale), w)

    def test_refuses_what_it_cannot_hold(self) -> None:
        with pytest.raises(ValueError, match="need a matrix"):
            pack_fp8(torch.zeros(128))
        with pytest.raises(ValueError, match="NaN or infinity"):
            pack_fp8(torch.full((1, 128), math.inf))
        with pytest.raises(ValueError, match="float8_e4m3fn"):
            unpack_fp8(torch.zeros(1, 128), torch.zeros(1, 1, dtype=torch.uint8))
        with pytest.raises(ValueError, match=r"needs \(1, 1\)"):
            unpack_fp8(torch.zeros(1, 128).to(torch.float8_e4m3fn), torch.zeros(1, 2, dtype=torch.uint8))


class TestNvfp4:
    def test_known_values(self) -> None:
        packed = torch.full((1, 16), 0xA7, dtype=torch.uint8)  # 6, -1
        scale = torch.tensor([[2.0, 0.5]]).to(torch.float8_e4m3fn)
        w = unpack_nvfp4(packed, scale, torch.tensor(0.25))
        assert w[0, [0, 1, 15, 16, 17]].tolist() == [3.0, -0.5, -0.5, 0.75, -0.125]
        assert same(unpack_nvfp4(packed, scale, torch.tensor([0.25])), w)

    def test_a_recast_of_fp4_is_lossless_both_ways(self) -> None:
        g = torch.Generator().manual_seed(10)
        packed = torch.randint(0, 256, (32, 64), generator=g).to(torch.uint8)
        # e4m3 holds the powers 2**-9 … 2**8; 2**-12 for the matrix is what was measured
        scale = torch.randint(127 - 21, 127 - 3, (32, 4), generator=g).to(torch.uint8)
        w = unpack_fp4(packed, scale)
        blocks = (e8m0_to_float(scale) * 2.0**12).to(torch.float8_e4m3fn).repeat_interleave(2, -1)
        recast = unpack_nvfp4(packed, blocks, torch.tensor(2.0**-12))
        assert same(recast, w)
        assert same(unpack_fp4(*pack_fp4(recast)), w)

    def test_refuses_what_it_cannot_read(self) -> None:
        packed, scale = torch.zeros(1, 16, dtype=torch.uint8), torch.ones(1, 2).to(torch.float8_e4m3fn)
        with pytest.raises(ValueError, match="block scales are float8_e4m3fn"):
            unpack_nvfp4(packed, torch.ones(1, 2), torch.tensor(1.0))
        with pytest.raises(ValueError, match="must be one number"):
            unpack_nvfp4(packed, scale, torch.ones(2))
        with pytest.raises(ValueError, match=r"weight_scale is \(1, 2\)"):
            unpack_nvfp4(torch.zeros(1, 32, dtype=torch.uint8), scale, torch.tensor(1.0))
