"""The engine against the whole-sequence network, at every position of prompts cut at random (C-11)."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.contract import FP32_PLAIN
from dsv4nb.engine.forward import Forward
from dsv4nb.engine.state import CpuState
from dsv4nb.reference.network import Network
from dsv4nb.testing.tiny_checkpoint import Format, write_tiny_checkpoint
from dsv4nb.weights.loader import load_weights

# prompt length, picked entries: few, so that most are dropped; for the longest prompt as many as the real model
CASES = [*((n, 16) for n in (1, 2, 3, 4, 5, 127, 128, 129, 255, 256, 257, 300, 1000)), (2100, 512)]
FORMATS: tuple[Format, ...] = ("bf16", "fp8fp4")
SHAPE: dict[str, Any] = {
    "compress_ratios": [0, 4, 128, 4],
    "hidden_size": 128,
    "index_n_heads": 8,
    "num_hash_layers": 1,
    "num_hidden_layers": 4,
    "o_lora_rank": 64,
    "vocab_size": 256,
}
SEED = 6  # no score lies on the edge of a selection
RELATIVE = 1e-5
# entries this near to the edge of the selection may fall either way when sums run in another order
AMBIGUOUS = 1e-5


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Network, Forward]]:
    """By picked entries: the network on the plain format, the engine on the packed format of the same numbers."""
    return {topk: make_pair(tmp_path_factory.mktemp(f"top{topk}"), topk) for topk in {topk for _, topk in CASES}}


def make_pair(root: Path, topk: int) -> tuple[Network, Forward]:
    plain, packed = (write_tiny_checkpoint(root / fmt, fmt=fmt, index_topk=topk, seed=SEED, **SHAPE) for fmt in FORMATS)
    network = Network(open_checkpoint(plain, require_tokenizer=False).config, FP32_PLAIN)
    tensors: dict[str, Tensor] = {}
    for file in plain.glob("*.safetensors"):
        tensors |= load_file(file)
    network.load_official(tensors)
    checkpoint = open_checkpoint(packed, require_tokenizer=False)
    return network.eval(), Forward(load_weights(checkpoint), checkpoint.config, FP32_PLAIN)


def smallest_gap(trace: dict[str, Tensor], topk: int) -> float:
    """Return how near an entry came to the edge of a selection, over all layers and positions."""
    gaps = [1.0]
    for name, score in trace.items():
        if name.endswith("index_score") and score.shape[-1] > topk:
            visible = torch.arange(1, score.shape[1] + 1) // 4
            hidden = torch.arange(score.shape[-1]) >= visible[:, None]
            best = score[0].masked_fill(hidden, -torch.inf).sort(-1, descending=True).values
            gaps += (best[:, topk - 1] - best[:, topk])[visible > topk].tolist()
    return min(gaps)


@pytest.mark.parametrize(("length", "topk"), CASES)
def test_every_position_of_a_prompt_in_random_chunks(
    pairs: dict[int, tuple[Network, Forward]], length: int, topk: int
) -> None:
    network, forward = pairs[topk]
    prompt = [(37 * i + 11) % 240 + 8 for i in range(length)]
    # the network is causal and needs one whole window of four: what follows the prompt changes nothing
    following = [8] * max(4 - length, 0)
    network.mode.trace = {}
    with torch.inference_mode():
        expected = network(torch.tensor([prompt + following]))[0, :length]
    assert smallest_gap(network.mode.trace, topk) > AMBIGUOUS, "the order of a sum decides: draw other weights"

    rng, state, rows = random.Random(length), CpuState(network.config), []
    with torch.inference_mode():
        while state.pos < length:
            part = prompt[state.pos :][: rng.choice([1, 2, 3, 8, 60, 128, 256])]
            rows.append(forward.rows(state, part))
            state.commit(len(part))
    assert (torch.cat(rows) - expected).abs().max() <= RELATIVE * expected.abs().max()
