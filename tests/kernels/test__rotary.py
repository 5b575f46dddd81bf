"""Rotation of a vector's tail; vectors of model.md section 9."""

import torch

from dsv4nb_kernels.reference._rotary import rotate_tail


def angles(position: float, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angle = position * frequencies
    sin = torch.stack((-angle.sin(), angle.sin()), -1).flatten()
    return angle.cos().repeat_interleave(2), sin


def test_rotates_the_hand_checked_tail() -> None:
    frequencies = 10000.0 ** (-torch.arange(32) / 32)
    x = torch.cat((torch.tensor([7.0, 8.0]), 0.01 * torch.arange(1, 65)))
    cos, sin = angles(1000, frequencies)
    turned = rotate_tail(x, cos, sin)
    ends = torch.cat((turned[:6], turned[-4:]))
    expected = [7, 8, -0.0109138, 0.0195164, -0.0499909, 0.0009561, 0.4907073, 0.7181270, 0.5393140, 0.7180810]
    torch.testing.assert_close(ends, torch.tensor(expected), atol=2e-6, rtol=0)
    torch.testing.assert_close(rotate_tail(turned, cos, -sin), x)
