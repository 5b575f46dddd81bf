"""The Walsh-Hadamard rotation; vectors of model.md section 9."""

import torch

from dsv4nb_kernels.reference._hadamard import hadamard, hadamard_matrix


def test_rotates_the_hand_checked_unit_vectors() -> None:
    rotated = hadamard(torch.eye(8)[None])[0]
    signs = torch.tensor([[1, -1, 1, -1, 1, -1, 1, -1], [1, 1, -1, -1, 1, 1, -1, -1]])
    torch.testing.assert_close(rotated[1:3], signs * 0.35355339)


def test_is_its_own_inverse() -> None:
    matrix = hadamard_matrix(128)
    torch.testing.assert_close(matrix @ matrix, torch.eye(128), atol=1e-6, rtol=0)
