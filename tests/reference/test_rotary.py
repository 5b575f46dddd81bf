"""Rotary tables per layer kind (C-08) and the vectors of the specification."""

from __future__ import annotations

import pytest
import torch

from dsv4nb.reference.rotary import frequencies, rotate
from dsv4nb.toy.shape import model_config

CONFIG = model_config()  # the rotary numbers of the released models


@pytest.mark.parametrize(
    ("compressed", "expected"),
    [
        (False, {0: 1.0, 8: 1e-1, 16: 1e-2, 20: 3.162277660e-3, 24: 1e-3, 31: 1.333521432e-4}),
        (True, {0: 1.0, 8: 5e-2, 16: 2.265625e-3, 20: 2.969777783e-4, 24: 1.953125e-5, 31: 5.680529037e-7}),
    ],
)
def test_c08_frequencies(compressed: bool, expected: dict[int, float]) -> None:
    table = frequencies(CONFIG, compressed=compressed)
    for pair, angle in expected.items():
        assert table[pair].item() == pytest.approx(angle, rel=1e-6)


@pytest.mark.parametrize(
    ("compressed", "first", "last"),
    [
        (True, [-0.0109138, 0.0195164, -0.0419713, -0.0271737], [0.6094876, 0.6205037, 0.6296363, 0.6403577]),
        (False, [-0.0109138, 0.0195164, -0.0499909, 0.0009561], [0.4907073, 0.7181270, 0.5393140, 0.7180810]),
    ],
)
def test_rotation_matches_the_vectors(compressed: bool, first: list[float], last: list[float]) -> None:
    x = (0.01 * torch.arange(1, 65))[None, None]
    y = rotate(x, torch.tensor([1000]), frequencies(CONFIG, compressed=compressed))[0, 0]
    torch.testing.assert_close(y[:4], torch.tensor(first), rtol=0, atol=2e-6)
    torch.testing.assert_close(y[-4:], torch.tensor(last), rtol=0, atol=2e-6)


@pytest.mark.parametrize("position", [0, 127, 65_537, 1_000_000])
@pytest.mark.parametrize("compressed", [False, True])
def test_c08_the_inverse_undoes_it_and_norms_are_kept(position: int, compressed: bool) -> None:
    x = torch.randn(1, 1, 2, 128, generator=torch.Generator().manual_seed(0))
    at, freq = torch.tensor([position]), frequencies(CONFIG, compressed=compressed)
    turned = rotate(x, at, freq)
    torch.testing.assert_close(rotate(turned, at, freq, inverse=True), x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=0)
    assert torch.equal(turned[..., :64], x[..., :64])


def test_rows_of_a_batch_may_have_their_own_positions() -> None:
    freq = frequencies(model_config(), compressed=False)
    x = torch.randn(2, 3, 4, 128, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[5, 6, 7], [40, 41, 42]])
    together = rotate(x, positions, freq)
    for row in range(2):
        assert torch.equal(together[row], rotate(x[row : row + 1], positions[row], freq)[0])
        assert torch.equal(rotate(x[:, :, 0], positions, freq)[row], together[row, :, 0])
