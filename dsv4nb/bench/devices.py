"""The GPUs that random weights are measured on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv4nb.engine.gpus import require_gpus
from dsv4nb.environ import parse_devices
from dsv4nb.errors import RequestError

if TYPE_CHECKING:
    import torch


def devices_of(text: str, placement: str | None = None) -> tuple[torch.device, ...]:
    """Return the GPUs of `--devices`; nothing that needs Triton is imported.

    Args:
        placement: how they share the model, where that was asked for.

    Raises:
        RequestError: it names none, or one that this machine does not have, Triton is not there, or they cannot share
            the model so.
    """
    ids = parse_devices(text, "devices")
    if isinstance(ids, str):
        raise RequestError(
            f"devices is {ids!r}; random weights are measured on GPUs: name some, such as 0 or 0,1. On the CPU,"
            " --model toy measures the bundled model",
            param="devices",
        )
    gpus = require_gpus(ids, placement)
    import torch

    return tuple(torch.device("cuda", gpu) for gpu in gpus)
