"""The drafter's logits behind a token: its bias of low rank, and the best (dspark.md 2.3)."""

from __future__ import annotations

from torch import Tensor

from dsv4nb_kernels.reference.head_argmax import best


def markov_step(
    base: Tensor, tokens: Tensor, markov_in: Tensor, markov_out: Tensor, first_id: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Add to each row what the token before it says of the next one, and find the best.

    Args:
        base: [T, N], logits of a slice of the vocabulary.
        tokens: [T] int64, ids of the whole vocabulary.
        markov_in: [V, r], a line for each token; markov_out: [N, r], of the slice.
        first_id: of the slice's first logit.

    Returns:
        logits [T, N], and as `best` values [T] and ids [T] int64.
    """
    logits = base + markov_in[tokens] @ markov_out.t()
    return (logits, *best(logits, first_id))
