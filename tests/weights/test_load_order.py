"""The order of a load, which what reads ahead goes by."""

from __future__ import annotations

import pytest

from dsv4nb.checkpoint.config import from_hf
from dsv4nb.checkpoint.synthetic import hf_config
from dsv4nb.weights.load_order import load_order
from dsv4nb.weights.placement import class_of
from dsv4nb.weights.synthetic import SyntheticReader


@pytest.mark.parametrize("shape", ["tiny", "tiny-0731"])
def test_every_tensor_is_in_one_batch_and_a_drafter_comes_last(shape: str) -> None:
    config = from_hf(hf_config(shape))
    entries = SyntheticReader(config).entries
    order = load_order(entries, config)
    names = [name for batch in order for name in batch]
    assert sorted(names) == sorted(entries)
    drafted = [class_of(name) == "drafter" for name in names]
    assert drafted == sorted(drafted) and drafted[-1] == (shape == "tiny-0731")
    for batch in order:
        assert len({(entries[name].dtype, entries[name].shape) for name in batch}) == 1


def test_a_layer_is_whole_before_the_next_one() -> None:
    config = from_hf(hf_config("tiny"))
    order = load_order(SyntheticReader(config).entries, config)
    layers = [int(batch[0].split(".")[1]) for batch in order if batch[0].startswith("layers.")]
    assert layers == sorted(layers) and len(set(layers)) == config.num_hidden_layers
