"""Rows times an FP8 matrix."""

import torch

from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference.fp8_rows import fp8_rows


def test_rounds_the_input_only_when_the_contract_says_so() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(16, 256, generator=generator), torch.randn(32, 256, generator=generator)
    torch.testing.assert_close(fp8_rows(x, weight, act_fp8=False), x @ weight.t(), atol=1e-4, rtol=1e-5)
    rounded = round_fp8(x, 128)
    assert not torch.equal(rounded, x)
    torch.testing.assert_close(fp8_rows(x, weight, act_fp8=True), rounded @ weight.t(), atol=1e-4, rtol=1e-5)


def test_a_tile_of_a_batch_equals_the_tile_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(40, 128, generator=generator), torch.randn(48, 128, generator=generator)
    batch = fp8_rows(x, weight, act_fp8=True)
    for first in range(0, 40, 8):
        assert torch.equal(fp8_rows(x[first : first + 8], weight, act_fp8=True), batch[first : first + 8])
