"""The trunk's own words in place of the corpus's: what a drafter has to predict when it is used.

Token by token this would be a forward per token. But with the draws fixed in advance a text is a function of the
logits alone, so all positions are drawn at once behind a guess, and what stands before the first change is final. The
guess is what the corpus says, which the trunk was trained to say: a few passes end a reply of any length.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dsv4nb.reference.network import Network
from dsv4nb.toy.batches import Batch
from dsv4nb.toy.graphs import Graphs

MAX_PASSES = 24  # rows that change more often end before their first open position


class Regenerator:
    """Draws replies of a frozen trunk."""

    def __init__(self, trunk: Network, graphs: Graphs, eos: int) -> None:
        self.trunk, self._graphs, self._eos = trunk, graphs, eos

    def batch(self, batch: Batch, g: torch.Generator, *, greedy: bool = False) -> Batch:
        """Return the batch with one reply of each row drawn anew, and nothing behind it.

        Args:
            batch: every row has a reply: tokens of weight 1.
            greedy: the last reply of each row by the likeliest tokens; else one at random, at temperature 1.

        Returns:
            A batch on the CPU; only what was drawn has a weight, and the weight 1.
        """
        device = next(self.trunk.parameters()).device
        first = _starts(batch.weight, None if greedy else g)
        uniform = torch.rand(batch.ids.shape, generator=g).to(device)
        ids, start, known = batch.ids.to(device), first.to(device), first.to(device)
        for _ in range(MAX_PASSES):
            drawn = self._graphs.run(
                ("draw", batch.bucket, greedy), partial(self._draw, greedy), ids, start, known, uniform
            )
            ids, known = drawn[:, :-1], drawn[:, -1]
            if bool((known == ids.shape[1]).all()):
                break
        return self._cut(batch.bucket, ids.cpu(), first, known.cpu())

    @torch.no_grad()
    def _draw(self, greedy: bool, ids: Tensor, start: Tensor, known: Tensor, uniform: Tensor) -> Tensor:
        """Draw all open positions behind the guess `ids` [B, T]; [B, T + 1]: the next guess and how much is final."""
        length = ids.shape[1]
        logits = self.trunk(ids)[:, :-1]
        if greedy:
            best = logits.argmax(-1)
        else:
            below = logits.softmax(-1).cumsum(-1) <= uniform[:, 1:, None]
            best = below.sum(-1).clamp(max=logits.shape[-1] - 1)
        place = torch.arange(1, length, device=ids.device)
        is_open = place >= known[:, None]
        words = torch.where(is_open, best, ids[:, 1:])
        changed = words != ids[:, 1:]
        final = torch.where(changed, place, length - 1).amin(1) + 1
        has_ended = ((words == self._eos) & (place >= start[:, None]) & (place < final[:, None])).any(1)
        final = torch.where(has_ended, length, final)
        return torch.cat([ids[:, :1], words, final[:, None]], 1)

    def _cut(self, bucket: str, ids: Tensor, start: Tensor, known: Tensor) -> Batch:
        """End each row behind its reply, or behind what is final of it."""
        place = torch.arange(ids.shape[1])
        is_reply = (place >= start[:, None]) & (place < known[:, None])
        ended = ((ids == self._eos) & is_reply).long().cumsum(1)
        is_reply &= (ended == 0) | ((ended == 1) & (ids == self._eos))
        is_kept = (place < start[:, None]) | is_reply
        return Batch(bucket=bucket, ids=torch.where(is_kept, ids, self._eos), weight=is_reply.float())


def _starts(weight: Tensor, g: torch.Generator | None) -> Tensor:
    """Return where a reply of each row begins, [B]: a random one of them, the last one without a generator."""
    said = weight == 1
    begins = said.clone()
    begins[:, 1:] &= ~said[:, :-1]
    if g is None:
        rank = torch.arange(weight.shape[1]).expand_as(weight).float()
    else:
        rank = torch.rand(weight.shape, generator=g)
    return torch.where(begins, rank, -1.0).argmax(1)
