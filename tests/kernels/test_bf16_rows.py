"""Rows times a matrix whose input is not rounded."""

import torch

from dsv4nb_kernels.reference.bf16_rows import bf16_rows


def test_multiplies_strided_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    wide, weight = torch.randn(16, 96, generator=generator), torch.randn(24, 32, generator=generator)
    for part in wide.chunk(3, 1):
        assert torch.equal(bf16_rows(part, weight), bf16_rows(part.contiguous(), weight))
        torch.testing.assert_close(bf16_rows(part, weight), part @ weight.t(), atol=1e-5, rtol=1e-5)
