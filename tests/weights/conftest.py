"""Packed weights bring Triton's decorators with them, which decide what a kernel is."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
