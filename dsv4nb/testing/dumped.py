"""What the arrays of a `DeviceEngine`'s dump stand for, and such arrays drawn at random."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dsv4nb_kernels.reference._records import pack_records, unpack_records

Array = npt.NDArray[Any]


def dumped_values(rows: Array, *, width: int, tail: int) -> npt.NDArray[np.float32]:
    """Return the values of an array of a dump, float32.

    Args:
        rows: [n, R] uint8 records; bfloat16 as uint16; or float32.
        width, tail: of a record.
    """
    if rows.dtype == np.uint8:
        return unpack_records(torch.from_numpy(rows), width, tail).float().numpy()
    return (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows


def drawn_like(rows: Array, rng: np.random.Generator, *, width: int, tail: int) -> Array:
    """Return normal values in the form and number of `rows`."""
    shape = (len(rows), width) if rows.dtype == np.uint8 else rows.shape
    values = torch.from_numpy(rng.standard_normal(shape, np.float32))
    if rows.dtype == np.uint8:
        return pack_records(values.bfloat16().float(), tail).numpy()
    return (values.bfloat16().view(torch.uint16) if rows.dtype == np.uint16 else values).numpy()
