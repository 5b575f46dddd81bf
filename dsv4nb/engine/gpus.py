"""Which GPUs an engine can run on; refuses by name where there are none."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from dsv4nb.errors import RequestError

WAY_OUT = "devices='cpu' runs everywhere"
TENSOR = "tensor"  # both GPUs run every layer, each with its share of the large matrices


def require_one_gpu(ids: Sequence[int]) -> int:
    """Return the id of the GPU to run on.

    Raises:
        RequestError: there is no CUDA device, none of that id, no Triton, or more than one is asked for.
    """
    if len(ids) != 1:
        raise RequestError(
            f"devices is {_names(ids)}; this runs on one GPU. Name one, such as devices={ids[0]}", param="devices"
        )
    return require_gpus(ids)[0]


def require_gpus(ids: Sequence[int], placement: str | None = None) -> tuple[int, ...]:
    """Return the ids of the GPUs to run on, one or two.

    Args:
        placement: how two share the model; None for what there is.

    Raises:
        RequestError: there is no CUDA device, none of an id, no Triton, more than two are asked for or another
            placement, or two do not reach each other's memory.
    """
    asked = _names(ids)
    if len(ids) > 2:
        raise RequestError(
            f"devices is {asked}; this version runs on one GPU, on two or on 'cpu'. Name two, such as"
            f" devices=({ids[0]}, {ids[1]})",
            param="devices",
        )
    require_placement(placement, len(ids))
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
    for one in ids:
        for other in ids:
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                raise RequestError(
                    f"devices is {asked}; GPU {one} does not reach the memory of GPU {other} (nvidia-smi topo -p2p r"
                    f" shows which do). Name two that do, or one: devices={ids[0]}",
                    param="devices",
                )
    return tuple(ids)


def require_placement(placement: str | None, n_gpus: int) -> None:
    """Refuse a placement that there is not on so many GPUs; none on the CPU.

    Raises:
        RequestError: it is not None and not that of two GPUs.
    """
    if placement is None:
        return
    if placement == "pipeline":
        raise RequestError(
            "placement is 'pipeline'; this version does not run layers on one GPU after the other. Leave placement="
            " out: two GPUs then share every layer",
            param="placement",
        )
    if placement != TENSOR:
        raise RequestError(f"placement is {placement!r}; it must be {TENSOR!r}", param="placement")
    if n_gpus != 2:
        where = f"{n_gpus} GPU" if n_gpus else "the CPU"
        raise RequestError(
            f"placement is {placement!r} on {where}; it is how two GPUs share a model, such as devices=(0, 1)",
            param="placement",
        )


def _names(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))
