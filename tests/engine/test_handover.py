"""What a span of layers leaves for the next one arrives as it was, in one copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dsv4nb
from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.engine.cache import tap_width
from dsv4nb.engine.handover import Handover, handover_bytes
from dsv4nb_kernels.hyper_mix import Boundary

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return open_checkpoint(Path(dsv4nb.__file__).parent / "toy" / "model").config


@pytest.mark.parametrize("has_taps", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_one_copy_takes_everything_across(config: ModelConfig, rows: int, has_taps: bool) -> None:
    width = config.hidden_size
    y, sent, came = torch.randn(1, rows, width), Boundary.empty(rows, width, CPU), Boundary.empty(rows, width, CPU)
    for tensor in (sent.stream, sent.post, sent.comb):
        tensor.normal_()
    taps = [torch.randn(rows, tap_width(config)).bfloat16(), torch.zeros(rows, tap_width(config)).bfloat16()]
    goes, arrives = (Handover.empty(config, rows, CPU, has_taps=has_taps) for _ in range(2))
    goes.leave(y, sent, taps[0])
    arrives.whole.copy_(goes.whole)
    assert torch.equal(arrives.enter(came, taps[1]), y)
    for ours, theirs in ((came.stream, sent.stream), (came.post, sent.post), (came.comb, sent.comb)):
        assert torch.equal(ours, theirs)
    assert torch.equal(taps[0], taps[1]) == has_taps


def test_every_piece_begins_where_a_kernel_may_read_and_less_fits_into_the_room_of_more(config: ModelConfig) -> None:
    most = torch.zeros(handover_bytes(config, 64, tapped=32), dtype=torch.uint8)
    for rows, tapped in ((64, 32), (33, 32), (9, 9)):
        size = handover_bytes(config, rows, tapped=tapped)
        made = Handover.within(most[:size], config, rows, tapped=tapped)
        assert made.taps is not None and len(made.taps) == tapped
        for piece in (made.y, made.post, made.comb, made.stream, made.taps):
            assert (piece.data_ptr() - most.data_ptr()) % 16 == 0
