"""An engine on random weights that stands anywhere."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dsv4nb.bench.asked import SPAN, Asked
from dsv4nb.bench.rig import Rig, counted_positions, positions, rig
from dsv4nb.engine.rank_forward import RankForward
from dsv4nb.errors import RequestError
from dsv4nb.weights.replayed_routes import measured_unions, replayed_tables

# one layer of each kind, as small as the kernels' tiles are, and experts enough for the unions of a text
pytestmark = pytest.mark.twins

SMALL: dict[str, Any] = {
    "compress_ratios": [0, 4, 128],
    "num_hash_layers": 1,
    "index_n_heads": 4,
    "index_topk": 32,
    "o_lora_rank": 64,
    "q_lora_rank": 256,
    "sliding_window": 32,
    "vocab_size": 512,
}
ASKED = Asked(shape="tiny", layers=3, experts=12, changes=SMALL, contexts=(40,), widths=(1, 2, 3, 4, 5, 6))
TOO_FEW = Asked(shape="tiny", layers=1, experts=8, changes={"index_topk": 32}, routes="measured")


@pytest.fixture
def made(request: pytest.FixtureRequest, twins: None) -> Iterator[Rig]:
    with rig(getattr(request, "param", ASKED)) as made:
        yield made


def measured(**changes: Any) -> Asked:
    return Asked(shape="tiny", layers=3, experts=12, changes=SMALL, routes="measured", contexts=(40,), **changes)


@pytest.mark.parametrize("made", [measured(widths=ASKED.widths)], indirect=True)
def test_replayed_routes_are_those_that_the_engine_takes(made: Rig) -> None:
    tables = replayed_tables(ASKED.config(), 512)
    found = made.experts
    for width in ASKED.widths:
        unions = [
            len(np.unique(table[pos : pos + width]))
            for pos in counted_positions(40, width)
            for table in tables.values()
        ]
        assert found[40, width] == statistics.fmean(unions)
    wanted = measured_unions(2)
    assert [found[40, width] for width in ASKED.widths] == pytest.approx(wanted, rel=0.15)


def test_free_routes_spread_further_than_those_of_a_text(made: Rig) -> None:
    found = made.experts
    assert found[40, 1] == 2
    # independent choices of 2 of 12, near enough
    assert found[40, 6] == pytest.approx(12 * (1 - (10 / 12) ** 6), rel=0.15)
    assert found[40, 6] > measured_unions(2)[5]
    assert made._counted() == pytest.approx(found, rel=0.1)  # other tokens


def test_a_table_begins_anew_where_it_ends(twins: None) -> None:
    with rig(measured(widths=(1,), max_seq=3000)) as made:
        assert made.tokens(510, 4) == [510, 511, 0, 1]
        made.forward(2000, 1)
        assert made.facts.max_seq == 3000


def test_a_context_costs_its_own_extent_however_much_room_there_is(twins: None) -> None:
    asked = replace(ASKED, contexts=(1024, 8100, 16_000), widths=(2,), max_seq=1 << 15)
    with rig(asked, counts=False) as made:
        assert made.state.caches.positions == 1 << 15
        forward = made.engine._forward
        assert isinstance(forward, RankForward)
        for context in asked.contexts:
            made.forward(context, 2)
        assert [extent for _, extent in forward._shorter] == [2048, 8192, 1 << 14]


def test_the_prefix_is_finite_and_the_same_each_time(made: Rig) -> None:
    again = made._random_state(made.engine)
    for ours, theirs in zip(made.state.caches.layers, again.caches.layers, strict=True):
        for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert torch.equal(one, other)
            assert bool(one.isfinite().all()) and float(one.float().std()) > 0.5
    rows = []
    for state in (made.state, again):
        state.pos = 200
        rows.append(made.engine.forward_rows(state, [1, 2, 3]))
    assert np.array_equal(*rows) and np.isfinite(rows[0]).all()


def test_samples_walk_behind_their_context() -> None:
    assert positions(1000, 100) == [1000, 1100, 1200]
    assert max(positions(0, 1)) < SPAN
    assert counted_positions(7, 1) == list(range(7, 7 + SPAN, 16))
    assert counted_positions(0, 100) == [0, 100, 200]


@pytest.mark.parametrize(
    ("asked", "param", "told"),
    [
        (Asked(shape="tiny", widths=(1, 9)), "widths", "widths has 9; a forward has 1 to 8 rows"),
        (Asked(shape="huge"), "shape", "there is no shape 'huge'"),
        (Asked(shape="tiny", contexts=(64, 1024), max_seq=1024), "max_seq", "context 1024 needs 1288 positions"),
        (TOO_FEW, "n_experts", "n_experts is 8; 6 positions of 2 experts each need 12"),
    ],
)
def test_what_cannot_be_is_refused(twins: None, asked: Asked, param: str, told: str) -> None:
    with pytest.raises(RequestError, match=told) as refused, rig(asked):
        pass
    assert refused.value.param == param
