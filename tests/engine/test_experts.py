"""How rows are laid into the experts' tiles."""

import numpy as np
import pytest

from dsv4nb.engine.experts import plan_tiles
from dsv4nb.engine.ops import TILE


@pytest.mark.parametrize(("lead", "count"), [(0, 1), (5, 1), (3, 8), (0, 64), (7, 200)])
def test_every_row_stands_in_its_slot_of_its_experts_tiles(lead: int, count: int) -> None:
    rng = np.random.default_rng(count)
    experts = np.sort(np.stack([rng.permutation(6)[:3] for _ in range(count)]), 1)
    weights = rng.random((count, 3), np.float32)
    places = -(-(lead + count) // TILE) * TILE
    plan = plan_tiles(experts, weights, lead=lead, places=places, n_experts=6)

    owner = {tile: expert for expert, first, last in plan.spans for tile in range(first, last)}
    assert sorted(owner) == list(range(plan.rows.size // TILE))
    assert [expert for expert, _, _ in plan.spans] == sorted({*experts.ravel().tolist(), 6})
    for i in range(count):
        for place, expert, weight in zip(plan.places[lead + i], [*experts[i], 6], [*weights[i], 1.0], strict=True):
            assert plan.rows[place] == lead + i
            assert plan.weights[place] == np.float32(weight)
            assert place % TILE == (lead + i) % TILE
            assert owner[place // TILE] == expert


def test_no_expert_gets_more_tiles_than_its_fullest_slot_needs() -> None:
    experts = np.zeros((16, 1), np.int64)
    plan = plan_tiles(experts, np.ones((16, 1), np.float32), lead=0, places=16, n_experts=4)
    assert plan.spans == ((0, 0, 2), (4, 2, 4))
