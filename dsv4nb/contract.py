"""The numeric contract: which roundings the arithmetic performs (model.md section 4).

A leaf: the whole-sequence reference, the twins and the engine all read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The roundings of one forward pass.

    Attributes:
        name: how screens and recipes call it.
        kv_fp8: window rows and compressed attention entries pass through e4m3, blocks of 64, outside the rotary tail.
        index_fp4: indexer queries and keys are Hadamard-rotated and pass through e2m1, blocks of 32.
        act_fp8: inputs of FP8 and FP4 matrices pass through e4m3, blocks of 128.
        activations: dtype the sublayers hand over; reductions and hyper-connections are float32 in both.
    """

    name: str
    kv_fp8: bool
    index_fp4: bool
    act_fp8: bool
    activations: Literal["float32", "bfloat16"] = "float32"


# the official kernels' arithmetic with float32 between the roundings: what the CPU runs
REF_FP8_ROUND = Contract(name="ref_fp8_round", kv_fp8=True, index_fp4=True, act_fp8=True)
# the day-one kernel: its in-place cast is an exact identity, so the KV rows are not rounded
CLAMP_ONLY = Contract(name="clamp_only", kv_fp8=False, index_fp4=True, act_fp8=True)

# the four modes of the golden files
FP32_PLAIN = Contract(name="fp32_plain", kv_fp8=False, index_fp4=False, act_fp8=False)
FP32_QAT = Contract(name="fp32_qat", kv_fp8=True, index_fp4=True, act_fp8=False)
FP32_FULL = Contract(name="fp32_full", kv_fp8=True, index_fp4=True, act_fp8=True)
BF16_FULL = Contract(name="bf16_full", kv_fp8=True, index_fp4=True, act_fp8=True, activations="bfloat16")

CONTRACTS = {c.name: c for c in (REF_FP8_ROUND, CLAMP_ONLY, FP32_PLAIN, FP32_QAT, FP32_FULL, BF16_FULL)}
