"""Shapes of made-up checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4nb.checkpoint.config import from_hf, from_inference
from dsv4nb.checkpoint.inventory import Drafter, expected_tensors
from dsv4nb.checkpoint.synthetic import SHAPES, hf_config, inference_config, official_shard
from dsv4nb.errors import CheckpointError, RequestError


@pytest.mark.parametrize("shape", SHAPES)
def test_both_spellings_say_the_same(shape: str) -> None:
    raw = hf_config(shape)
    config = from_hf(raw)
    other = from_inference(inference_config(raw))
    for name in (
        "compress_ratios",
        "drafter_ratios",
        "dspark",
        "num_hash_layers",
        "moe_intermediate_size",
        "rope_factor",
    ):
        assert getattr(config, name) == getattr(other, name), name


@pytest.mark.parametrize(
    ("shape", "drafter", "n_tensors", "n_bytes", "n_shards"),
    [
        ("flash", "nextn", 69_187, 159_609_485_896, 46),
        ("flash-0731", "dspark", 72_317, 166_878_536_440, 48),
    ],
)
def test_the_releases_are_reproduced(shape: str, drafter: Drafter, n_tensors: int, n_bytes: int, n_shards: int) -> None:
    expected = expected_tensors(from_hf(hf_config(shape)), drafter, "fp4")
    assert (len(expected), sum(s.nbytes for s in expected.values())) == (n_tensors, n_bytes)
    files: dict[tuple[int, int], int] = {}
    for name, spec in expected.items():
        files[official_shard(name)] = files.get(official_shard(name), 0) + spec.nbytes
    in_order = [size for _, size in sorted(files.items())]
    assert len(in_order) == n_shards
    assert in_order[:3] == [1_059_061_760, 3_566_148_952, 3_566_148_952]
    assert in_order[44] == 1_059_332_116  # the head, after 43 layers


@pytest.mark.parametrize(
    ("changes", "follows"),
    [
        (
            {"num_hidden_layers": 4},
            {"compress_ratios": (0, 0, 4, 128), "num_hash_layers": 3, "taps": (1, 2, 3), "drafter_ratios": (0, 0, 0)},
        ),
        ({"num_hidden_layers": 1}, {"compress_ratios": (0,), "num_hash_layers": 1, "taps": (0,)}),
        ({"num_hidden_layers": 50}, {"compress_ratios": (0, 0, *(4, 128) * 24), "taps": (47, 48, 49)}),
        ({"n_routed_experts": 4}, {"num_experts_per_tok": 4, "num_hidden_layers": 43}),
        ({"vocab_size": 1000}, {"noise": 999}),
        ({"num_hidden_layers": 3, "compress_ratios": [4, 4, 4]}, {"compress_ratios": (4, 4, 4)}),
        ({"dspark_target_layer_ids": [7]}, {"taps": (7,)}),
    ],
)
def test_what_depends_on_a_changed_field_follows_it(changes: dict[str, Any], follows: dict[str, object]) -> None:
    config = from_hf(hf_config("flash-0731", changes))
    assert config.dspark is not None
    found = {"taps": config.dspark.target_layer_ids, "noise": config.dspark.noise_token_id}
    for name, value in follows.items():
        assert (found[name] if name in found else getattr(config, name)) == value


def test_another_drafter_brings_its_fields() -> None:
    assert from_hf(hf_config("flash", drafter="dspark")) == from_hf(hf_config("flash-0731"))
    assert from_hf(hf_config("flash-0731", drafter="none")).drafter_ratios == ()


def test_shapes_and_counts_that_are_none_are_refused() -> None:
    with pytest.raises(RequestError, match="no shape 'pro'; there are flash, flash-0731, tiny, tiny-0731"):
        hf_config("pro")
    for count in (0, -1, "4", 2.5):
        with pytest.raises(CheckpointError, match=r"num_hidden_layers is .* at least 1"):
            hf_config("tiny", {"num_hidden_layers": count})
