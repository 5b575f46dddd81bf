"""What a step on a GPU makes of its position, held against what the CPU engine's batches say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4nb.checkpoint.config import ModelConfig, from_hf
from dsv4nb.engine.batch import Batch, Rotary
from dsv4nb.engine.cache import layer_shape
from dsv4nb.engine.step import TOKENS_AT, Room, StepInputs, Turns
from dsv4nb.testing.tiny_checkpoint import tiny_hf_config

MAX_SEQ = 640


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return replace(from_hf(tiny_hf_config()), sliding_window=64)


@pytest.fixture(scope="module")
def turns(config: ModelConfig) -> Turns:
    return Turns.of(config, MAX_SEQ, torch.device("cpu"))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_slots_places_and_angles_are_those_of_a_batch(config: ModelConfig, turns: Turns, rows: int) -> None:
    inputs, rotary = StepInputs(config, rows, MAX_SEQ, turns), Rotary(config)
    for pos in (0, 1, 3, 60, 63, 64, 126, 127, 128, 255, 318, 320, 511, 600):
        inputs.given[0] = pos
        inputs.given[TOKENS_AT:] = torch.arange(rows)
        inputs.refresh()
        batch = Batch([0] * rows, pos, config, rotary)
        assert inputs.position.tolist() == [pos]
        assert inputs.tokens.tolist() == list(range(rows))
        assert torch.equal(inputs.slots.long(), batch.window_slots)
        assert torch.equal(inputs.window.long(), batch.window_seen.masked_fill(batch.window_hidden, -1))
        for is_compressed in (False, True):
            turn = batch.turn(is_compressed=is_compressed).rows(batch.live)
            assert torch.equal(inputs.turn(is_compressed=is_compressed), torch.stack((*turn, turn.back.sin)))
        for ratio, windows in inputs.windows.items():
            shape = layer_shape(config, config.compress_ratios.index(ratio)).compressor
            assert shape is not None
            pooling = batch.pooling(shape)
            assert torch.equal(windows.visible.long(), pooling.visible)
            ends = [row for row in range(rows) if (pos + row) % ratio == ratio - 1]
            assert torch.equal(windows.turn[0, ends], pooling.turn.cos)
            assert torch.equal(windows.turn[1, ends], pooling.turn.sin)
            if windows.places is not None:
                for row, count in zip(windows.places, windows.visible, strict=True):
                    assert row[:count].tolist() == list(range(count))
                    assert bool((row[count:] == -1).all())
        assert (inputs.windows[4].places is None, inputs.windows[128].places is None) == (True, False)


def test_addresses_stand_and_suit_the_kernels(config: ModelConfig, turns: Turns) -> None:
    inputs = StepInputs(config, 3, MAX_SEQ, turns)
    read = (inputs.position, inputs.tokens, inputs.slots, inputs.window, *inputs.turn(is_compressed=True))
    before = [tensor.data_ptr() for tensor in read]
    inputs.refresh()
    inputs.refresh()
    assert [tensor.data_ptr() for tensor in read] == before
    assert all(address % 16 == 0 for address in before)


def test_room_is_made_once_for_a_name_and_a_shape() -> None:
    room = Room(torch.device("cpu"))
    first = room.tensor("x", 2, 128)
    assert room.tensor("x", 2, 128) is first
    assert room.tensor("y", 2, 128) is not first
    assert room.tensor("x", 3, 128) is not first
    assert room.tensor("x", 2, 128, dtype=torch.bfloat16) is not first
    rounded = room.rounded("r", 2, 256)
    assert rounded.codes.shape == (2, 256)
    assert room.rounded("r", 2, 256).scales is rounded.scales
