"""Where engines of tests run: on a CPU that stands for one GPU or two, or on GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from dsv4nb.weights.placement import SharedKind

PLACEMENTS: Mapping[str, tuple[list[str], SharedKind]] = {
    "one": (["cpu"], "tensor"),
    "pair": (["cpu", "cpu"], "tensor"),
    "pipeline": (["cpu", "cpu"], "pipeline"),
    "one gpu": (["cuda:0"], "tensor"),
    "pair of gpus": (["cuda:0", "cuda:1"], "tensor"),
    "pipeline of gpus": (["cuda:0", "cuda:1"], "pipeline"),
}
