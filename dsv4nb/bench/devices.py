"""The GPUs that random weights are measured on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv4nb.engine.gpus import require_gpus
from dsv4nb.environ import parse_devices
from dsv4nb.errors import RequestError

if TYPE_CHECKING:
    import torch


def devices_of(text: str) -> tuple[torch.device, ...]:
    """Return the GPUs of `--devices`; nothing that needs Triton is imported.

    Raises:
        RequestError: it names none, or one that this machine does not have, or Triton is not there.
    """
    ids = parse_devices(text, "devices")
    if isinstance(ids, str):
        raise RequestError(
            f"devices is {ids!r}; random weights are measured on GPUs: name one or two, such as 0. On the CPU,"
            " --model toy measures the bundled model",
            param="devices",
        )
    gpus = require_gpus(ids)
    import torch

    return tuple(torch.device("cuda", gpu) for gpu in gpus)
