"""The first difference between two of a kind, in words; "" when they are the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dsv4nb.engine.logprobs import margin_of
from dsv4nb.engine.protocol import Row

Arrays = Mapping[str, npt.NDArray[Any]]


def of_rows(found: Row, expected: Row) -> str:
    """Compare two rows of logits [V]."""
    if found.tobytes() == expected.tobytes():
        return ""
    differs = found.view(np.uint32) != expected.view(np.uint32)
    at = int(np.flatnonzero(differs)[0])
    return (
        f"{np.count_nonzero(differs)} of {found.shape[0]} logits differ, the first that of id {at}: "
        f"{found[at]:.9g} against {expected[at]:.9g}; the best ids are {found.argmax()} and {expected.argmax()}, "
        f"{margin_of(expected):.3g} above the second"
    )


def of_caches(found: Arrays, expected: Arrays) -> str:
    """Compare what two snapshots hold, as `Engine.dump` returns it."""
    if found.keys() != expected.keys():
        return f"only one of the caches has {', '.join(sorted(found.keys() ^ expected.keys()))}"
    for name, array in found.items():
        other = expected[name]
        if array.shape != other.shape:
            return f"{name} is {list(array.shape)} against {list(other.shape)}"
        if array.tobytes() != other.tobytes():
            row = next(i for i in range(len(array)) if array[i].tobytes() != other[i].tobytes())
            return f"row {row} of the {len(array)} of {name} differs"
    return ""
