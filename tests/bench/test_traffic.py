"""Bytes of weights that a forward reads."""

from __future__ import annotations

import pytest

from dsv4nb.bench.traffic import Traffic
from dsv4nb.checkpoint.config import ModelConfig, from_hf
from dsv4nb.checkpoint.synthetic import hf_config
from dsv4nb.weights.placement import place
from dsv4nb.weights.synthetic import SyntheticReader


def traffic(config: ModelConfig, ranks: int = 1) -> list[Traffic]:
    entries = {name: spec for name, spec in SyntheticReader(config).entries.items() if not name.startswith("mtp.")}
    placement = place(config, entries, ranks=ranks, kind="tensor" if ranks > 1 else "single")
    return [Traffic.of(placement, rank) for rank in range(ranks)]


def test_a_layer_of_each_kind_counted_by_hand() -> None:
    config = from_hf(hf_config("tiny", {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}))
    width, vocabulary = 256, 512

    def fp8(rows: int, columns: int) -> int:
        return rows * columns + (rows // 128) * (columns // 128)

    attention = fp8(128, width) + fp8(512, 128) + fp8(128, width) + fp8(256, 256) + fp8(width, 256) + 4 * 4
    norms = 2 * (width + width + 128 + 128)
    streams = 2 * 4 * (24 * 4 * width + 24 + 3)
    shared = 3 * fp8(128, width)
    gate = 2 * 8 * width
    layer = attention + norms + streams + shared + gate
    biases = 2 * 4 * 8  # of the two layers that are not hash-routed
    overlapping = 2 * 2 * 256 * width + 4 * 4 * 256 + 2 * 128
    indexer = fp8(32 * 128, 128) + 2 * 32 * width + overlapping
    late = 2 * 2 * 128 * width + 4 * 128 * 128 + 2 * 128
    top = 2 * vocabulary * width + 2 * width + 4 * (4 * 4 * width + 4 + 1)
    (found,) = traffic(config)
    assert found.dense == 3 * layer + biases + overlapping + indexer + late + top
    assert found.per_row == 2 * width + 8 * 2  # a line of the embedding, a line of one hash table
    expert = 3 * (128 * width // 2 + 128 * width // 32)
    assert found.per_expert == 3 * expert
    assert found.read(1, 2.0) == found.dense + found.per_row + 2 * 3 * expert
    assert found.read(6, 5.5) == found.dense + 6 * found.per_row + 33 * expert // 2


def test_a_token_of_v4_flash_reads_what_was_counted_from_its_shapes() -> None:
    config = from_hf(hf_config("flash-0731"))
    (whole,) = traffic(config)
    assert whole.read(1, 6) == pytest.approx(11.22e9, rel=0.02)
    halves = traffic(config, ranks=2)
    assert halves[0] == halves[1]
    assert halves[0].per_expert * 2 == whole.per_expert
    assert whole.dense / 2 < halves[0].dense < whole.dense
