"""The engine against logits of an independent reference (model.md section 10)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.contract import CLAMP_ONLY, CONTRACTS, REF_FP8_ROUND
from dsv4nb.engine.forward import Forward
from dsv4nb.engine.state import CpuState
from dsv4nb.reference.loading import load_network
from dsv4nb.weights.store import Weights

# Largest and median row. Exact arithmetic agrees everywhere. A rounding that falls the other way is cached and moves
# every later row that sees it, and does so among exact implementations too; then only medians and clear winners say
# something.
LIMITS = {"fp32_plain": (1e-4, 1e-4), "fp32_qat": (np.inf, 0.02), "fp32_full": (np.inf, 0.05)}
CLEAR = 1.0  # logits between the two best


def run(checkpoint: Checkpoint, weights: Weights, mode: str, tokens: list[int]) -> Tensor:
    """Return the logits of every position."""
    forward, state = Forward(weights, checkpoint.config, CONTRACTS[mode]), CpuState(checkpoint.config)
    rows = []
    with torch.inference_mode():
        for first in range(0, len(tokens), 256):
            part = tokens[first : first + 256]
            rows.append(forward.rows(state, part))
            state.commit(len(part))
    return torch.cat(rows)


@pytest.mark.parametrize("mode", LIMITS)
def test_agrees_with_the_frozen_logits(checkpoint: Checkpoint, weights: Weights, goldens: Path, mode: str) -> None:
    golden = load_file(goldens / f"{mode}.safetensors")
    prompt, decoded = golden["prompt"].tolist(), golden["decode_tokens"].tolist()
    logits = run(checkpoint, weights, mode, prompt + decoded).numpy()
    for found, expected in (
        (logits[golden["prefill_rows"]], golden["prefill_logits"]),
        (logits[len(prompt) :], golden["decode_logits"]),
    ):
        off = np.abs(found - expected).max(1)
        assert off.max() <= LIMITS[mode][0]
        assert np.median(off) <= LIMITS[mode][1]
        second, best = np.sort(expected, 1)[:, -2:].T
        is_clear = best - second > CLEAR
        assert is_clear.sum() > 10
        assert np.array_equal(found.argmax(1)[is_clear], expected.argmax(1)[is_clear])


def test_m06_a_contract_is_arithmetic_not_a_label(checkpoint: Checkpoint, weights: Weights) -> None:
    prompt = [(37 * i + 11) % 248 + 8 for i in range(16)]
    for own, other in ((REF_FP8_ROUND, CLAMP_ONLY), (CLAMP_ONLY, REF_FP8_ROUND)):
        found = run(checkpoint, weights, own.name, prompt)
        with torch.inference_mode():
            same, differs = (load_network(checkpoint, contract)(torch.tensor([prompt]))[0] for contract in (own, other))
        assert (found - same).abs().amax(1).median() < 1e-4
        assert (found - differs).abs().amax(1).min() > 0.1
