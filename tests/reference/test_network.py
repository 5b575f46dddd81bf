"""The whole-sequence network against logits of an independent reference (model.md section 10)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.contract import BF16_FULL, CONTRACTS, FP32_PLAIN
from dsv4nb.reference.loading import load_network
from dsv4nb.reference.network import Network

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
CHECKPOINT = open_checkpoint(GOLDENS / "checkpoint", require_tokenizer=False)

# largest and median difference of a row; a rounding that falls the other way moves every later row that sees it
LIMITS = {"fp32_plain": (1e-4, 1e-4), "fp32_qat": (float("inf"), 0.02), "fp32_full": (float("inf"), 0.05)}


@pytest.fixture(scope="module")
def plain() -> Network:
    return load_network(CHECKPOINT, FP32_PLAIN)


@pytest.mark.parametrize("mode", LIMITS)
def test_matches_the_frozen_logits(mode: str) -> None:
    golden = load_file(GOLDENS / f"{mode}.safetensors")
    network = load_network(CHECKPOINT, CONTRACTS[mode])
    logits = network(torch.cat([golden["prompt"], golden["decode_tokens"]])[None])[0]
    n_prompt = golden["prompt"].numel()
    for found, expected in (
        (logits[golden["prefill_rows"]], golden["prefill_logits"]),
        (logits[n_prompt:], golden["decode_logits"]),
    ):
        off = (found - expected).abs().amax(-1)
        assert off.max() <= LIMITS[mode][0]
        assert off.median() <= LIMITS[mode][1]


def test_is_causal(plain: Network) -> None:
    ids = torch.randint(8, 250, (1, 150), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 140:] = 9
    torch.testing.assert_close(plain(ids)[:, :140], plain(changed)[:, :140], rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129])
def test_a_short_prompt_equals_the_start_of_a_long_one(plain: Network, length: int) -> None:
    ids = torch.randint(8, 250, (1, 140), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(plain(ids[:, :length]), plain(ids)[:, :length], rtol=0, atol=1e-5)


def test_rows_of_a_batch_do_not_see_each_other(plain: Network) -> None:
    ids = torch.randint(8, 250, (3, 90), generator=torch.Generator().manual_seed(2))
    together = plain(ids)
    for row in range(3):
        torch.testing.assert_close(together[row], plain(ids[row : row + 1])[0], rtol=0, atol=1e-5)


def test_bf16_hand_over_stays_near_float32(plain: Network) -> None:
    ids = torch.randint(8, 250, (1, 64), generator=torch.Generator().manual_seed(3))
    off = (load_network(CHECKPOINT, BF16_FULL)(ids) - plain(ids)).abs()
    assert 1e-3 < off.median() < 0.5


def test_parameters_go_out_under_official_names_and_come_back(plain: Network) -> None:
    official = plain.official()
    trunk = {n for n in CHECKPOINT.entries if not n.startswith("mtp.") and not n.endswith(".scale")}
    assert set(official) == trunk
    again = Network(CHECKPOINT.config)
    again.load_official(official)
    for name, value in again.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_every_parameter_learns_and_the_indexer_only_from_its_own_loss() -> None:
    network = load_network(CHECKPOINT, CONTRACTS["ref_fp8_round"])
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not name.endswith("gate.bias"))
    network.mode.round_weights = True
    network.mode.index_losses = losses = []
    ids = torch.randint(8, 250, (2, 160), generator=torch.Generator().manual_seed(4))
    logits = network(ids)
    language = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    language.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            learned = parameter.grad is not None and bool(parameter.grad.abs().max() > 0)
            assert learned != ("indexer" in name), name
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    for name, parameter in network.named_parameters():
        assert not parameter.requires_grad or (parameter.grad is not None and parameter.grad.isfinite().all()), name
        if "indexer" in name:
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 0, name
