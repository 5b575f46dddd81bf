"""Which GPUs an engine can run on; refuses by name where there are none."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from dsv4nb.errors import RequestError

WAY_OUT = "devices='cpu' runs everywhere"


def require_one_gpu(ids: Sequence[int]) -> int:
    """Return the id of the GPU to run on.

    Raises:
        RequestError: there is no CUDA device, none of that id, no Triton, or more than one is asked for.
    """
    import torch  # only where a GPU is asked for

    asked = ",".join(map(str, ids))
    if len(ids) != 1:
        raise RequestError(
            f"devices is {asked}; this version runs on one GPU or on 'cpu'. Name one, such as devices={ids[0]}",
            param="devices",
        )
    if not torch.cuda.is_available():
        why = "is built without CUDA" if torch.version.cuda is None else "finds no CUDA device"
        raise RequestError(f"devices is {asked}; torch {torch.__version__} {why} here; {WAY_OUT}", param="devices")
    if ids[0] >= (count := torch.cuda.device_count()):
        raise RequestError(
            f"devices is {asked}; this machine has {count} CUDA device{'s' * (count != 1)}, from 0 on; {WAY_OUT}",
            param="devices",
        )
    if importlib.util.find_spec("triton") is None:
        raise RequestError(
            f"devices is {asked}; the kernels need Triton, which is not installed (Linux only: pip install triton);"
            f" {WAY_OUT}",
            param="devices",
        )
    return ids[0]
