"""A window of source rows becomes one entry (model.md 3.4)."""

from __future__ import annotations

import torch
from torch import Tensor


def compress(values: Tensor, scores: Tensor) -> Tensor:
    """Pool with one softmax per channel over the rows of each window.

    Args:
        values, scores: [n, rows, d]; a row whose scores are -inf takes no part, whatever its values.

    Returns:
        [n, d], before norm and rotation.
    """
    raised = torch.exp(scores - scores.amax(1, keepdim=True))
    return (raised * values).sum(1) / raised.sum(1)
