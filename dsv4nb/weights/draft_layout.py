"""The stored tensors of a DSpark drafter → what its kernels read, and what speaks against that; pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.weights.kernel_layout import StoredBlock, pack_hyper
from dsv4nb.weights.kernel_shapes import STEP_ROWS, KernelShapes
from dsv4nb.weights.rank_store import RankDraft, RankLayer
from dsv4nb_kernels import fp8_rows, markov_step
from dsv4nb_kernels.bf16_rows import Bf16Matrix

RANKS = (16, 32, 64, 128, 256, 512)  # of the Markov head
_NAN_CODE = 0x7F  # e4m3, without its sign
_NAN_SCALE = 0xFF  # e8m0


def draft_limit(config: ModelConfig) -> str:
    """Return why the kernels cannot run a drafter of these sizes, "" when they can."""
    assert config.dspark is not None
    size, rank, cut = config.dspark.block_size, config.dspark.markov_rank, markov_step.TUNING.rows
    if size > STEP_ROWS:
        return f"dspark_block_size is {size}; the GPU engine drafts up to {STEP_ROWS}"
    if rank not in RANKS:
        return f"dspark_markov_rank is {rank}; the GPU engine runs {', '.join(map(str, RANKS[:-1]))} and {RANKS[-1]}"
    if config.vocab_size % cut:
        return f"vocab_size is {config.vocab_size}; the GPU engine drafts from multiples of {cut}"
    return ""


def not_a_number(name: str, stored: Tensor) -> str:
    """Say that tensor `name`, or the matrix that it scales, is not finite; "" when it is."""
    if stored.dtype == torch.float8_e4m3fn:
        is_bad = bool(((stored.view(torch.uint8) & _NAN_CODE) == _NAN_CODE).any())
    elif name.endswith(".scale"):
        is_bad = bool((stored == _NAN_SCALE).any())
    else:
        is_bad = stored.is_floating_point() and not bool(stored.isfinite().all())
    whose = f"{name.removesuffix('.scale')}.weight" if name.endswith(".scale") else name
    return f"{whose} is not finite" if is_bad else ""


def pack_draft(
    first: StoredBlock,
    last: StoredBlock,
    stages: Sequence[RankLayer],
    config: ModelConfig,
    shapes: KernelShapes,
    *,
    embed: Tensor,
    head: Bf16Matrix,
) -> RankDraft:
    """Pack a drafter.

    Args:
        first, last: tensors of the first and the last stage, names without "mtp.N.".
        stages: packed, of these `shapes`.
        embed, head: the trunk's, whole, on the same device.

    Raises:
        CheckpointError: a tensor is stored in a format that the kernels do not read.
        ValueError: a pack function refuses a tensor.
    """
    codes, scales = first.matrix("main_proj")
    return RankDraft(
        shapes=shapes,
        embed=embed,
        head=head,
        main=fp8_rows.pack(codes.contiguous(), scales.contiguous()),
        main_norm=first.floats("main_norm.weight").contiguous(),
        stages=tuple(stages),
        hyper_head=pack_hyper(last, config, "hc_head", "norm.weight"),
        markov_in=last.bf16("markov_head.markov_w1.weight").contiguous(),
        markov_out=last.bf16("markov_head.markov_w2.weight").contiguous(),
        confidence=last.floats("confidence_head.proj.weight")[0].contiguous(),
    )
