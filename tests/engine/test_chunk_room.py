"""Where the rows of a chunk stand and what it takes of its past, held against what a step of rows says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4nb.checkpoint.config import ModelConfig, from_hf
from dsv4nb.engine.cache import layer_shape, window_rows
from dsv4nb.engine.chunk_room import Carry, ChunkInputs, ChunkRoom
from dsv4nb.engine.step import TOKENS_AT, StepInputs, Turns
from dsv4nb.testing.tiny_checkpoint import tiny_hf_config

MAX_SEQ, MOST = 640, 128


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return replace(from_hf(tiny_hf_config()), sliding_window=64)


@pytest.fixture(scope="module")
def turns(config: ModelConfig) -> Turns:
    return Turns.of(config, MAX_SEQ, torch.device("cpu"))


@pytest.mark.parametrize("rows", [33, 64, 128])
def test_angles_and_visible_counts_are_those_of_a_step(config: ModelConfig, turns: Turns, rows: int) -> None:
    room = ChunkRoom(MOST, torch.device("cpu"))
    inputs, step = ChunkInputs(config, room, turns), StepInputs(config, rows, MAX_SEQ, turns)
    for pos in (0, 1, 63, 127, 300, 512):
        for given in (inputs.given, step.given):
            given[0], given[1] = pos, rows
            given[TOKENS_AT : TOKENS_AT + rows] = torch.arange(rows)
        inputs.refresh(rows)
        step.refresh()
        assert torch.equal(inputs.tokens, step.tokens)
        for is_compressed in (False, True):
            assert torch.equal(inputs.turn(is_compressed=is_compressed), step.turn(is_compressed=is_compressed))
        for ratio, windows in step.windows.items():
            assert torch.equal(inputs.visible(ratio), windows.visible)
            assert torch.equal(inputs.entry_turn(ratio), windows.turn)
        assert torch.equal(inputs.last_slots(32), step.slots[-32:].long())
        assert inputs.slots.tolist() == [(pos + i) % (MOST + 64) for i in range(rows)]


@pytest.mark.parametrize(("count", "held"), [(64, 320), (8, 264), (128, 384), (512, 768)])
@pytest.mark.parametrize("pos", [0, 1, 5, 63, 64, 500, 1000])
def test_a_ring_is_carried_there_and_back(count: int, held: int, pos: int) -> None:
    """Rows hold their position; what no position wrote is NaN and stays where nobody looks."""
    rows, nan = 70, float("nan")
    room = ChunkRoom(MOST, torch.device("cpu"))
    carry = Carry(count, held, room)
    own, wanted = torch.full((held, 2), nan), torch.full((held, 2), nan)
    for at in range(max(pos - held, 0), pos):
        own[at % held] = at
    carry.refresh(*torch.tensor([[pos], [rows]], dtype=torch.int32))
    ring = carry.ring("x", own).fill_(nan)
    carry.take(own, ring)
    for at in range(max(pos - count, 0), pos):
        assert ring[at % len(ring), 0] == at
    for at in range(pos, pos + rows):
        ring[at % len(ring)] = at
    carry.leave(ring, own)
    for at in range(max(pos + rows - count, 0), pos + rows):
        wanted[at % held] = at
        assert own[at % held, 0] == at, at


def test_rings_are_long_enough_for_a_chunk_and_what_its_first_row_sees(config: ModelConfig, turns: Turns) -> None:
    inputs = ChunkInputs(config, ChunkRoom(MOST, torch.device("cpu")), turns)
    assert inputs.window.ring_rows >= MOST + config.sliding_window - 1
    assert inputs.window.held == window_rows(config)
    for layer, ratio in enumerate(config.compress_ratios[: config.num_hidden_layers]):
        if (shape := layer_shape(config, layer).compressor) is not None:
            assert inputs.sources[ratio].ring_rows >= MOST + shape.reach


def test_room_is_made_once_for_chunks_of_every_length() -> None:
    room = ChunkRoom(MOST, torch.device("cpu"))
    first = room.tensor("x", 40, 2, 40, 8)
    taken = room.nbytes
    assert taken == 2 * MOST * 8 * 4
    for rows in (1, 33, MOST):
        again = room.tensor("x", rows, 2, rows, 8)
        assert (again.shape, again.data_ptr()) == ((2, rows, 8), first.data_ptr())
        assert room.tensor("x", rows, rows, 16, dtype=torch.bfloat16).data_ptr() == first.data_ptr()
        plan = room.plan(rows, 2, 6)
        assert len(plan.order) == 2 * rows
    assert room.nbytes == taken + 4 * (2 * 2 * MOST + 2 * 6 + 2 * len(room.plan(MOST, 2, 6).tile_experts))


def test_room_that_is_asked_for_as_before_but_for_more_later_is_there_at_once() -> None:
    room = ChunkRoom(8, torch.device("cpu"))
    room.fixed("x", 4, most=4)
    assert room.fixed("x", 4, most=4) is room.fixed("x", 4, most=4)
    room.fixed("x", 4, most=64)
    assert room.nbytes == 64 * 4
    held = room.fixed("x", 64)
    assert held[:4].data_ptr() == room.fixed("x", 4, most=64).data_ptr()
