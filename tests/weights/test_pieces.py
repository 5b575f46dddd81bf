"""Batches of tensors → pieces: every byte once, for all that have it."""

from __future__ import annotations

import pytest

from dsv4nb.checkpoint.config import from_hf
from dsv4nb.checkpoint.synthetic import hf_config
from dsv4nb.weights.load_order import load_order
from dsv4nb.weights.pieces import Piece, batch_of, pieces_of
from dsv4nb.weights.placement import Kind, Placement, place
from dsv4nb.weights.synthetic import SyntheticReader

CONFIG = from_hf(hf_config("tiny", {"index_topk": 32}))
ENTRIES = SyntheticReader(CONFIG).entries


def placed(ranks: int, kind: Kind) -> Placement:
    return place(CONFIG, ENTRIES, ranks=ranks, kind=kind)


def cut(names: tuple[str, ...], placement: Placement, limit: int) -> list[Piece]:
    return list(pieces_of(batch_of(names, ENTRIES, placement), limit))


@pytest.mark.parametrize(("ranks", "kind"), [(1, "single"), (2, "tensor"), (3, "pipeline")])
@pytest.mark.parametrize("limit", [1 << 24, 1000, 96])
def test_every_byte_of_a_checkpoint_is_in_one_piece_for_all_that_have_it(ranks: int, kind: Kind, limit: int) -> None:
    placement = placed(ranks, kind)
    for names in load_order(ENTRIES, CONFIG):
        batch = batch_of(names, ENTRIES, placement)
        pieces = cut(names, placement, limit)
        assert all(0 < piece.nbytes <= limit for piece in pieces)
        assert all(names[piece.row : piece.row + len(piece.names)] == piece.names for piece in pieces)
        for name in names:
            own = sorted((piece.first, piece.last) for piece in pieces if name in piece.names)
            assert [first for first, _ in own] == [0, *(last for _, last in own[:-1])]
            assert own[-1][1] == ENTRIES[name].nbytes == batch.nbytes // len(names)
        for rank, span in enumerate(batch.spans):
            got = sum(piece.nbytes for piece in pieces if rank in piece.holders)
            assert got == (0 if span is None else len(names) * (span[1] - span[0]))


def test_each_of_two_ranks_gets_its_rows_and_both_all_columns() -> None:
    experts = range(4)
    rows = tuple(f"layers.2.ffn.experts.{expert}.w1.weight" for expert in experts)
    size = ENTRIES[rows[0]].nbytes
    found = cut(rows, placed(2, "tensor"), size)
    assert [(piece.row, piece.first, piece.last, piece.holders) for piece in found] == [
        (row, first, first + size // 2, (rank,)) for rank, first in ((0, 0), (1, size // 2)) for row in (0, 2)
    ]
    (whole,) = cut(tuple(name.replace("w1", "w2") for name in rows), placed(2, "tensor"), 4 * size)
    assert (whole.first, whole.last, whole.holders) == (0, size, (0, 1))


def test_what_is_larger_than_a_piece_is_cut_along() -> None:
    size = ENTRIES["embed.weight"].nbytes
    found = cut(("embed.weight",), placed(1, "single"), size // 2 - 1)
    assert [piece.nbytes for piece in found] == [size // 2 - 1, size // 2 - 1, 2]


def test_what_a_rank_holds_is_the_sum_of_its_batches() -> None:
    for ranks, kind in ((1, "single"), (2, "tensor"), (3, "pipeline")):
        placement = place(CONFIG, ENTRIES, ranks=ranks, kind=kind)  # type: ignore[arg-type]
        batches = [batch_of(names, ENTRIES, placement) for names in load_order(ENTRIES, CONFIG)]
        for rank in range(ranks):
            assert sum(batch.held_bytes(rank) for batch in batches) == sum(placement.nbytes(rank).values())
