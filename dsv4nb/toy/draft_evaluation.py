"""The drafter on held-out questions: the trunk answers greedily, and the answers are decoded again with drafts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dsv4nb.reference.drafter import DrafterNetwork
from dsv4nb.reference.network import Network
from dsv4nb.toy.batches import Batch, Encoder
from dsv4nb.toy.blocks import all_blocks
from dsv4nb.toy.draft_figures import Rollout, auc_of, roll_out, summarise, told_drafts
from dsv4nb.toy.graphs import Graphs
from dsv4nb.toy.probes import probes
from dsv4nb.toy.regenerate import Regenerator

ROOM = 48  # tokens that an answer may be longer than the expected one
TOKENS_PER_BATCH = 24_000


@torch.no_grad()
def evaluate(trunk: Network, drafter: DrafterNetwork, encoder: Encoder, seed: int, many: int) -> dict[str, object]:
    """Answer up to `many` held-out questions of each skill in both modes.

    Returns:
        Figures by name. "told": slots told the true tokens before them, 1 - TV and agreement per slot. "rounds":
        greedy speculative decoding, its per-position curves (dspark.md 7.1), tau in all and per skill, and how well the
        confidence tells kept drafts from the first one that was not.
    """
    device = next(trunk.parameters()).device
    # every batch has its own length, so nothing is worth capturing
    regenerator = Regenerator(trunk, Graphs(torch.device("cpu")), encoder.tokenizer.eos_id)
    tables: list[Tensor] = []
    rounds: dict[str, Rollout] = {}
    judged: list[tuple[float, bool]] = []
    for names, asked in _batches(encoder, seed, many):
        batch = regenerator.batch(asked, torch.Generator().manual_seed(seed), greedy=True)
        table, drafts, confidence = _draft(trunk, drafter, batch, device)
        tables.append(table)
        for i, name in enumerate(names):
            said = (batch.weight[i] == 1).nonzero()[:, 0]
            text = batch.ids[i, said].tolist()
            rolled, places = roll_out(text, drafts[i])
            rounds[name] = rounds.get(name, Rollout(verified=(), accepted=())) + rolled
            for place, n, kept in zip(places, rolled.verified, rolled.accepted, strict=True):
                judged += [(confidence[i][place][k], k < kept) for k in range(min(n, kept + 1))]
    told, all_rounds = summarise(torch.cat(tables, 1)), sum(rounds.values(), Rollout(verified=(), accepted=()))
    slots = range(drafter.dspark.block_size)
    score, outcome = (torch.tensor(list(part)) for part in zip(*judged, strict=True))
    return {
        "told_accept": _short(told.accepted),
        "told_agree": _short(told.agrees),
        "told_tau_prob": round(told.tau_prob, 3),
        "told_auc": _short([told.auc])[0],
        "rounds": len(all_rounds.accepted),
        "greedy_tau": round(all_rounds.tau, 3),
        "greedy_unconditional": _short([all_rounds.unconditional(k) for k in slots]),
        "greedy_conditional": _short([all_rounds.conditional(k) for k in slots]),
        "greedy_auc": _short([auc_of(score, outcome)])[0],
        "greedy_tau_by_skill": {name: round(r.tau, 2) for name, r in sorted(rounds.items())},
    }


def _short(values: Iterable[float]) -> list[float | None]:
    """Round to three places; None for what nothing was seen of, as JSON has no NaN."""
    return [None if math.isnan(v) else round(v, 3) for v in values]


def _batches(encoder: Encoder, seed: int, many: int) -> Iterator[tuple[list[str], Batch]]:
    """Yield skills and questions with their expected answers, rows of similar length together."""
    rows: list[tuple[str, list[int]]] = []
    asked = probes(seed, encoder, many)
    random.Random(seed).shuffle(asked)  # there are more facts than `many`, in order
    left = dict.fromkeys(((p.name, p.thinking) for p in asked), many)
    for p in asked:
        if left[p.name, p.thinking] > 0:
            left[p.name, p.thinking] -= 1
            name = f"{p.name}/{'thinking' if p.thinking else 'chat'}"
            rows.append((name, encoder.ids(p.conversation, thinking=p.thinking)))
    rows.sort(key=lambda row: len(row[1]))
    while rows:
        count = 1
        while count < len(rows) and (len(rows[count][1]) + ROOM) * (count + 1) <= TOKENS_PER_BATCH:
            count += 1
        taken, rows = rows[:count], rows[count:]
        length = len(taken[-1][1]) + ROOM
        ids = torch.full((count, length), encoder.tokenizer.eos_id)
        weight = torch.zeros(count, length)
        for i, (_, row) in enumerate(taken):
            ids[i, : len(row)] = torch.tensor(row)
            weight[i, : len(row)] = torch.tensor(encoder.weights(row))
        yield [name for name, _ in taken], Batch(bucket="held out", ids=ids, weight=weight)


def _draft(
    trunk: Network, drafter: DrafterNetwork, batch: Batch, device: torch.device
) -> tuple[Tensor, list[list[list[int]]], list[list[list[float]]]]:
    """Draft behind every token of the answers.

    Returns:
        The table of `judge`, and per row and pending token the drafts and their confidence logits.
    """
    ids, blocks = batch.ids.to(device), all_blocks(batch.weight, drafter.dspark.block_size)
    row, position = blocks.row.to(device), blocks.position.to(device)
    stream, taps = trunk.tapped(ids)
    hidden = drafter.hidden(drafter.context(taps), row, position, ids[row, position])
    walked = drafter.walk(hidden, ids[row, position])
    table = told_drafts(drafter, ids, taps, trunk.logits(stream), row, position, blocks.supervised.to(device))
    drafts, confidence = walked.logits.argmax(-1).tolist(), walked.confidence.tolist()
    by_row: tuple[list[list[list[int]]], list[list[list[float]]]] = ([[] for _ in ids], [[] for _ in ids])
    for i, n in enumerate(blocks.row.tolist()):
        by_row[0][n].append(drafts[i])
        by_row[1][n].append(confidence[i])
    return table.cpu(), *by_row
