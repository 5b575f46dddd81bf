"""Export → checkpoint → reader, and the bundled checkpoint itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dsv4nb.checkpoint.config import read_config
from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.checkpoint.synthetic import inference_config
from dsv4nb.reference.loading import load_network
from dsv4nb.reference.network import Network
from dsv4nb.toy.export import pack, rounded, write_checkpoint
from dsv4nb.toy.shape import hf_config, model_config
from dsv4nb.toy.train import assign_hash_experts, initialise

BUNDLED = Path(__file__).parents[2] / "dsv4nb" / "toy" / "model"


@pytest.fixture(scope="module")
def network() -> Network:
    network = Network(model_config())
    initialise(network, 7)
    assign_hash_experts(network, torch.arange(network.config.vocab_size).float(), 7)
    return network


def test_an_exported_network_opens_and_holds_the_rounded_numbers(network: Network, tmp_path: Path) -> None:
    tokenizer = (BUNDLED / "tokenizer.json").read_text(encoding="utf-8")
    total = write_checkpoint(tmp_path, network.official(), tokenizer)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.payload_bytes == total
    assert checkpoint.drafter == "none"
    assert (checkpoint.encoding.revision, checkpoint.encoding.certain) == ("v0731", True)
    expected = rounded(network.official())
    for name, value in load_network(checkpoint).official().items():
        assert torch.equal(value, expected[name]), name


def test_rounding_again_changes_nothing(network: Network) -> None:
    once = rounded(network.official())
    for name, value in rounded(once).items():
        assert torch.equal(value, once[name]), name


def test_training_with_rounding_uses_the_numbers_of_the_export(network: Network) -> None:
    expected = rounded(network.official())
    network.mode.round_weights = True
    with torch.no_grad():
        assert torch.equal(network.layers[2].attn.wq_a.effective(), expected["layers.2.attn.wq_a.weight"])
        experts = network.layers[3].ffn.experts
        assert torch.equal(experts._effective(experts.w2)[5], expected["layers.3.ffn.experts.5.w2.weight"])
        assert torch.equal(network.head.effective(), expected["head.weight"])
    network.mode.round_weights = False


def test_a_parameter_without_a_known_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.mystery\.weight"):
        pack("layers.0.mystery.weight", torch.zeros(128, 128))


def test_hash_experts_get_equal_shares(network: Network) -> None:
    frequency = torch.arange(network.config.vocab_size).float()
    table = network.layers[0].ffn.gate.tid2eid
    assert all(len(set(row)) == network.config.num_experts_per_tok for row in table.tolist())
    load = torch.zeros(network.config.n_routed_experts)
    load.index_add_(0, table.flatten(), frequency.repeat_interleave(table.shape[1]))
    assert load.max() / load.mean() < 1.02


@pytest.mark.parametrize("drafter", [False, True])
def test_both_config_spellings_state_the_same_facts(tmp_path: Path, drafter: bool) -> None:
    (tmp_path / "inference").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(hf_config(drafter=drafter)))
    (tmp_path / "inference" / "config.json").write_text(json.dumps(inference_config(hf_config(drafter=drafter))))
    config = read_config(tmp_path)
    assert (config.dspark is not None) == drafter
    assert config.drafter_ratios == (0,) * (3 if drafter else 1)


def test_the_bundled_checkpoint_is_the_official_layout() -> None:
    checkpoint = open_checkpoint(BUNDLED)
    assert checkpoint.config == model_config()
    kinds = {checkpoint.config.kind(layer) for layer in range(checkpoint.config.num_hidden_layers)}
    assert kinds == {"swa", "csa", "hca"}
    assert {e.dtype for e in checkpoint.entries.values()} == {"BF16", "F32", "F8_E4M3", "F8_E8M0", "I8", "I64"}
