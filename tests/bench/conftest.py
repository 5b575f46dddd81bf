"""The measurements of the GPU engine, without a GPU: the kernels' twins on the CPU in its place."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's decorators ask when they are read


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the CPU stand for whatever GPU is named."""
    from dsv4nb.bench import devices, step_kernels, synthetic_decode
    from dsv4nb.testing.twin_kernels import twin_kernels

    cpu = (torch.device("cpu"),)
    monkeypatch.setattr(devices, "devices_of", lambda text, placement: cpu * (text.count(",") + 1))
    for bench in (synthetic_decode, step_kernels):
        monkeypatch.setattr(bench, "PROFILED", 1)  # there are thousands of operations
    with twin_kernels():
        yield
