"""The two rotary tables; C-08 and model.md section 9."""

import pytest
import torch

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.engine.ops import rotate_tail
from dsv4nb.engine.rope import RotaryTable, frequencies

# pair: ratio 0, ratio 4 and 128
ANGLES = {
    0: (1.000000000, 1.000000000),
    1: (0.7498942, 0.68765604),
    8: (1.000000000e-1, 5.000000000e-2),
    14: (1.778279410e-2, 0.0052868566),
    16: (1.000000000e-2, 2.265625000e-3),
    17: (7.498942093e-3, 0.0013968013),
    20: (3.162277660e-3, 2.969777783e-4),
    24: (1.000000000e-3, 1.953125000e-5),
    25: (7.498942093e-4, 5.3723124e-6),
    31: (1.333521432e-4, 5.680529037e-7),
}
TAIL = {
    False: [-0.0109138, 0.0195164, -0.0499909, 0.0009561, 0.4907073, 0.7181270, 0.5393140, 0.7180810],
    True: [-0.0109138, 0.0195164, -0.0419713, -0.0271737, 0.6094876, 0.6205037, 0.6296363, 0.6403577],
}


@pytest.mark.parametrize("is_compressed", [False, True])
def test_angles_per_position(checkpoint: Checkpoint, is_compressed: bool) -> None:
    found = frequencies(checkpoint.config, is_compressed=is_compressed)
    expected = torch.tensor([pair[is_compressed] for pair in ANGLES.values()])
    torch.testing.assert_close(found[list(ANGLES)], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_compressed", [False, True])
def test_turns_the_hand_checked_tail(checkpoint: Checkpoint, is_compressed: bool) -> None:
    turn = RotaryTable(checkpoint.config, is_compressed=is_compressed).at(1000, 1001)
    turned = rotate_tail(0.01 * torch.arange(1.0, 65.0)[None], *turn)[0]
    torch.testing.assert_close(
        turned[[0, 1, 2, 3, -4, -3, -2, -1]], torch.tensor(TAIL[is_compressed]), atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("position", [0, 127, 65_537])
def test_back_undoes_a_turn_and_norms_stay(checkpoint: Checkpoint, is_compressed: bool, position: int) -> None:
    turn = RotaryTable(checkpoint.config, is_compressed=is_compressed).at(position, position + 1)
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(position))
    turned = rotate_tail(x, *turn)
    torch.testing.assert_close(turned.norm(), x.norm(), rtol=1e-5, atol=0)
    torch.testing.assert_close(rotate_tail(turned, *turn.back), x, atol=1e-5, rtol=0)


def test_an_angle_does_not_depend_on_what_was_asked_before(checkpoint: Checkpoint) -> None:
    at_once, grown = (RotaryTable(checkpoint.config, is_compressed=True) for _ in range(2))
    for stop in (1, 8, 1025):
        grown.at(0, stop)
    for a, b in zip(at_once.at(0, 3000, 4), grown.at(0, 3000, 4), strict=True):
        assert torch.equal(a, b)
