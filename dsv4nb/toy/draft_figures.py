"""How good drafts are: the losses of training, and the figures of dspark.md 7.1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4nb.reference.drafter import DrafterNetwork, Drafts
from dsv4nb.rounds.calibration import auc

FIELDS = ("supervised", "cross_entropy", "distance", "confidence_loss", "agrees", "confidence")


def told_drafts(
    drafter: DrafterNetwork, ids: Tensor, taps: Tensor, logits: Tensor, row: Tensor, position: Tensor, there: Tensor
) -> Tensor:
    """Draft M blocks of sequences that the trunk has run, each slot told the true token before it; as `judge`.

    Args:
        ids: [B, T]; taps, logits: [B, T, ...] of the trunk.
        row, position: [M] of the pending tokens; there: [M, B] bool, the supervised slots.
    """
    behind = position[:, None] + torch.arange(drafter.dspark.block_size, device=ids.device)
    last = ids.shape[1] - 1
    target, label = logits[row[:, None], behind.clamp(max=last)], ids[row[:, None], (behind + 1).clamp(max=last)]
    return judge(drafter(ids, taps, row, position), target, label, there)


def judge(drafts: Drafts, target: Tensor, label: Tensor, supervised: Tensor) -> Tensor:
    """Compare drafts that were told the true tokens with the trunk; a row per name of FIELDS, [6, M, B] float32.

    Args:
        target: [M, B, V] logits of the trunk for what each slot predicts.
        label: [M, B] true ids; supervised: [M, B] bool.
    """
    ce = F.cross_entropy(drafts.logits.flatten(0, 1), label.flatten(), reduction="none").view_as(label)
    distance = (drafts.logits.softmax(-1) - target.softmax(-1)).abs().sum(-1)
    accepted = 1 - distance.detach() / 2
    bce = F.binary_cross_entropy_with_logits(drafts.confidence, accepted, reduction="none")
    agrees = drafts.logits.detach().argmax(-1) == target.argmax(-1)
    return torch.stack([supervised.float(), ce, distance, bce, agrees.float(), drafts.confidence.detach()])


def losses(table: Tensor) -> Tensor:
    """Return cross-entropy, distance and confidence loss, each a mean over the supervised slots, early ones first."""
    width = table.shape[-1]
    w = table[0] * torch.exp(-torch.arange(width, device=table.device) / width)
    return (table[1:4] * w).sum((1, 2)) / w.sum().clamp_min(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Averages over blocks; per-slot tuples are as long as a block.

    Attributes:
        losses: cross-entropy, distance, confidence loss.
        accepted: 1 - TV per slot, the chance that sampling accepts a draft.
        agrees: share of slots whose likeliest token is the trunk's.
        tau_prob: 1 + the sum over slots of the chance that all drafts up to this one are accepted.
        auc: of the confidence, for whether the likeliest tokens agree.
    """

    losses: tuple[float, ...]
    accepted: tuple[float, ...]
    agrees: tuple[float, ...]
    tau_prob: float
    auc: float

    def __str__(self) -> str:
        ce, distance, bce = self.losses
        slots = "  ".join(" ".join(f"{v:.2f}" for v in per_slot) for per_slot in (self.accepted, self.agrees))
        means = f"loss {ce:.3f}/{distance:.3f}/{bce:.3f}"
        return f"{means}  accept, agree {slots}  tau {self.tau_prob:.2f}  auc {self.auc:.2f}"


def summarise(table: Tensor) -> Figures:
    """Average a table of `judge`; blocks of several steps may be side by side."""
    there, _, distance, _, agrees, confidence = table
    accepted = 1 - distance / 2
    slots = there.sum(0).clamp_min(1.0)
    survival = (accepted.cumprod(-1) * there).sum(0) / slots
    is_there = there.bool()
    return Figures(
        losses=tuple(losses(table).tolist()),
        accepted=tuple(((accepted * there).sum(0) / slots).tolist()),
        agrees=tuple(((agrees * there).sum(0) / slots).tolist()),
        tau_prob=1 + float(survival.sum()),
        auc=auc_of(confidence[is_there], agrees[is_there].bool()),
    )


def auc_of(score: Tensor, outcome: Tensor) -> float:
    """Return the area under the curve of scores [N] for outcomes [N] bool; NaN where one outcome is missing."""
    found = auc(score.double().cpu().numpy(), outcome.cpu().numpy())
    return float("nan") if found is None else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Rounds of greedy speculative decoding.

    Attributes:
        verified, accepted: per round, drafts judged (up to a block, less at the end of the text) and kept.
    """

    verified: tuple[int, ...]
    accepted: tuple[int, ...]

    def __add__(self, other: Rollout) -> Rollout:
        return Rollout(verified=self.verified + other.verified, accepted=self.accepted + other.accepted)

    @property
    def tau(self) -> float:
        """Mean tokens per round: the kept drafts and the trunk's own next token."""
        return 1 + sum(self.accepted) / max(1, len(self.accepted))

    def unconditional(self, slot: int) -> float:
        """Share of all rounds that kept more than `slot` drafts, 0-based."""
        return sum(a > slot for a in self.accepted) / max(1, len(self.accepted))

    def conditional(self, slot: int) -> float:
        """Share of the rounds that judged draft `slot`, all before it kept, and kept it; NaN without any."""
        judged = [a for a, n in zip(self.accepted, self.verified, strict=True) if a >= slot < n]
        return sum(a > slot for a in judged) / len(judged) if judged else float("nan")


def roll_out(text: list[int], drafted: list[list[int]]) -> tuple[Rollout, list[int]]:
    """Decode a text that greedy decoding wrote, given the drafts behind each of its tokens.

    Args:
        text: the reply, its end token included.
        drafted: for each token but the last one, the drafts behind it.

    Returns:
        The rounds, and the place in `text` of each round's pending token.
    """
    place, places, verified, accepted = 0, [], [], []
    while place < len(text) - 1:
        drafts = drafted[place]
        ahead = text[place + 1 : place + 1 + len(drafts)]
        differs = [draft != token for draft, token in zip(drafts, ahead, strict=False)]
        kept = differs.index(True) if True in differs else len(ahead)
        places.append(place)
        verified.append(len(ahead))
        accepted.append(kept)
        place += kept + 1
    return Rollout(verified=tuple(verified), accepted=tuple(accepted)), places
