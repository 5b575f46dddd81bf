"""Which GPUs an engine can run on; refuses by name where there are none."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from dsv4nb.errors import RequestError
from dsv4nb.weights.placement import SharedKind

WAY_OUT = "devices='cpu' runs everywhere"
TENSOR: Final = "tensor"  # two GPUs run every layer, each with its share of the large matrices
PIPELINE: Final = "pipeline"  # each GPU runs some of the layers, one after the other


def require_gpus(ids: Sequence[int], placement: str | None = None) -> tuple[int, ...]:
    """Return the ids of the GPUs to run on.

    Args:
        placement: how several share the model; None for what `placed` chooses.

    Raises:
        RequestError: there is no CUDA device, none of an id, no Triton, no such placement, more than two GPUs and no
            pipeline, or two that are to share every layer and do not reach each other's memory.
    """
    asked = _names(ids)
    require_placement(placement, len(ids))
    if len(ids) > 2 and placement != PIPELINE:
        raise RequestError(
            f"devices is {asked}; two GPUs share every layer at most. Name two, such as devices=({ids[0]}, {ids[1]}),"
            f" or let layers run on one GPU after the other: placement={PIPELINE!r}",
            param="devices",
        )
    import torch  # only where a GPU is asked for

    if not torch.cuda.is_available():
        why = "is built without CUDA" if torch.version.cuda is None else "finds no CUDA device"
        raise RequestError(f"devices is {asked}; torch {torch.__version__} {why} here; {WAY_OUT}", param="devices")
    if max(ids) >= (count := torch.cuda.device_count()):
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
    if placement == TENSOR and (fault := unreached(ids)):
        raise RequestError(
            f"placement is {TENSOR!r} on devices {asked}; {fault} (nvidia-smi topo -p2p r shows which do)."
            f" placement={PIPELINE!r} needs no such reach; or name two that do, or one: devices={ids[0]}",
            param="placement",
        )
    return tuple(ids)


def placed(ids: Sequence[int], placement: str | None) -> tuple[SharedKind, str]:
    """Return how GPUs that can be run on share a model, and why: "" where that is as asked, or as it usually is."""
    if placement == PIPELINE:
        return PIPELINE, ""
    fault = unreached(ids) if placement is None and len(ids) > 1 else ""
    return (PIPELINE, fault) if fault else (TENSOR, "")


def unreached(ids: Sequence[int]) -> str:
    """Say which GPU does not reach which other one's memory; "" where all do, and where there are none."""
    import torch

    if not torch.cuda.is_available():
        return ""
    for one in ids:
        for other in ids:
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return f"GPU {one} does not reach the memory of GPU {other}"
    return ""


def give_back() -> None:
    """Give memory of GPUs that nothing holds any more to other processes; torch would keep it for the next tensors."""
    import torch

    gc.collect()  # engines refer to themselves
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def given_back_on_failure(ids: Sequence[int]) -> Iterator[None]:
    """Give back what the GPUs of these ids hold of a block that fails."""
    try:
        yield
    except BaseException:
        if ids:
            give_back()
        raise


def require_placement(placement: str | None, n_gpus: int) -> None:
    """Refuse a placement that there is not on so many GPUs; none on the CPU.

    Raises:
        RequestError: it is not None and not one of several GPUs.
    """
    if placement is None:
        return
    if placement not in (TENSOR, PIPELINE):
        raise RequestError(f"placement is {placement!r}; it must be {TENSOR!r} or {PIPELINE!r}", param="placement")
    if n_gpus < 2:
        where = f"{n_gpus} GPU" if n_gpus else "the CPU"
        raise RequestError(
            f"placement is {placement!r} on {where}; it is how several GPUs share a model, such as devices=(0, 1)",
            param="placement",
        )


def _names(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))
