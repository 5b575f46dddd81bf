"""Drafts and draws on tables of six tokens, where everything can be counted (dspark.md 10.1).

    python tests/engine/draws.py --rounds 60000 --seeds 1500

Rule B: the first two tokens of so many rounds against their exact joint distribution, over filters of p and q, and
two ways to do it wrong, which must be found. Rule A: for so many seeds, filters and proposals, rounds say what single
steps say.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dsv4nb.config import SamplerConfig, SpecConfig
from dsv4nb.engine import rejection
from dsv4nb.engine.protocol import ChooseDraft, Proposal, Row, Verified
from dsv4nb.engine.rejection import Drawn, distribution, draw
from dsv4nb.engine.sampler import choose
from dsv4nb.engine.speculate import Choice, play

V = 6
START = 0
Table = npt.NDArray[np.float32]  # [V, V]: logits of the next token by the last one
Floats = npt.NDArray[np.float64]
Decide = Callable[[Row, SamplerConfig, int, Drawn | None], int]

_rng = np.random.default_rng(3)
TARGET: Table = (0.7 * _rng.normal(size=(V, V))).astype(np.float32)
DRAFTER: Table = (0.5 * TARGET + 0.9 * _rng.normal(size=(V, V))).astype(np.float32)

NONE = SamplerConfig(temperature=1.0)
FILTERS = {
    "none": NONE,
    "T 0.7": SamplerConfig(temperature=0.7),
    "top-k 3": SamplerConfig(top_k=3),
    "top-p 0.8": SamplerConfig(top_p=0.8),
    "min-p 0.2": SamplerConfig(min_p=0.2),
}
Q_FILTERS = ("same", "none", "one-hot")


def probabilities(row: Row, config: SamplerConfig) -> Floats:
    """Return [V] what the filters leave of a row."""
    ids, probs = distribution(row, config)
    out = np.zeros(V)
    out[ids] = probs
    return out


def joint(config: SamplerConfig) -> Floats:
    """Return the exact joint distribution of two tokens, [V, V]."""
    first = probabilities(TARGET[START], config)
    return np.stack([first[a] * probabilities(TARGET[a], config) for a in range(V)])


def of_drafts(config: SamplerConfig, q: str) -> SamplerConfig:
    """Return the filters of the drafts."""
    return {"same": config, "none": NONE, "one-hot": SamplerConfig(top_k=1)}[q]


def counted(rounds: int, config: SamplerConfig, drafts: SamplerConfig, decide: Decide = rejection.decide) -> Floats:
    """Return how often each pair of first tokens came, over seeds, [V, V]."""
    counts = np.zeros((V, V))
    for seed in range(rounds):
        counts[_two_tokens(replace(config, seed=seed), replace(drafts, seed=seed), decide)] += 1
    return counts


def _two_tokens(config: SamplerConfig, drafts: SamplerConfig, decide: Decide) -> tuple[int, int]:
    """Two tokens by rounds of two drafts; where the first draft falls, another round goes on."""
    said: list[int] = []
    while len(said) < 2:
        last, at = (said[-1] if said else START), len(said)
        drawn: list[Drawn] = []
        for slot in range(2):
            drawn.append(draw(DRAFTER[drawn[-1].token if drawn else last], drafts, at + slot))
        for slot in range(3):
            token = decide(TARGET[last], config, at + slot, drawn[slot] if slot < 2 else None)
            said.append(token)
            last = token
            if slot == 2 or token != drawn[slot].token:
                break
    return said[0], said[1]


def with_another_q(row: Row, config: SamplerConfig, position: int, drawn: Drawn | None) -> int:
    """Decide with the unfiltered distribution of drafts that were drawn from a filtered one."""
    if drawn is not None:
        ids, probs = next(
            distribution(source, NONE)
            for source in DRAFTER
            if np.array_equal(distribution(source, SamplerConfig(top_k=2))[1], drawn.probs)
        )
        drawn = Drawn(token=drawn.token, ids=ids, probs=probs)
    return rejection.decide(row, config, position, drawn)


@contextmanager
def shared_noise() -> Iterator[None]:
    """Draw what stands in a rejected draft's place with the noise of the draft."""
    before, rejection.REST_STREAM = rejection.REST_STREAM, rejection.DRAFT_STREAM
    try:
        yield
    finally:
        rejection.REST_STREAM = before


SKEWED_Q, SKEWED_P = ([0.6, 0.3, 0.05, 0.03, 0.01, 0.01], [0.05, 0.35, 0.1, 0.1, 0.2, 0.2])


def skewed(rounds: int) -> Floats:
    """Return how often each token came of one draft by SKEWED_Q and one decision by SKEWED_P, [V]."""
    q, p = (np.log(np.array(share, np.float32)) for share in (SKEWED_Q, SKEWED_P))
    counts = np.zeros(V)
    for seed in range(rounds):
        config = SamplerConfig(temperature=1.0, seed=seed)
        counts[rejection.decide(p, config, 3, draw(q, config, 3))] += 1
    return counts


def p_value(counts: Floats, expected: Floats) -> float:
    """Return the chi-square p-value, rare cells pooled (Wilson and Hilferty's approximation); 0 off the support."""
    if counts[expected == 0].sum():
        return 0.0
    want, got = expected[expected > 0] * counts.sum(), counts[expected > 0]
    rare = want < 5
    want, got = np.append(want[~rare], want[rare].sum()), np.append(got[~rare], got[rare].sum())
    want, got = want[want > 0], got[want > 0]
    chi, freedom = float(((got - want) ** 2 / want).sum()), len(want) - 1
    if freedom == 0:
        return 1.0
    z = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


class TableLine:
    """A sequence that the tables go on with; a `Line`."""

    room = 100

    def __init__(self) -> None:
        self.ids: list[int] = []

    @property
    def pos(self) -> int:
        return len(self.ids)

    def draft(self, pending: int, choose: ChooseDraft) -> Proposal:
        """Draft three tokens by the drafter's table."""
        ids: list[int] = []
        for slot in range(3):
            ids.append(choose(DRAFTER[ids[-1] if ids else pending], slot, ids))
        return Proposal(ids=tuple(ids))

    def verify(self, tokens: Sequence[int], config: SamplerConfig | None) -> Verified:
        """Return the target's rows."""
        return Verified(rows=tuple(TARGET[list(tokens)]))


class TableJudge:
    """Chooses by one sampler; a `Judge`."""

    def __init__(self, config: SamplerConfig, proposal: str) -> None:
        self.config, self.proposal = config, proposal
        self.drafts_by = self.decides_by = None

    def draft(self, row: Row, position: int, ahead: Sequence[int]) -> int:
        return choose(row, self.config, position) if self.proposal == "coupled" else int(row.argmax())

    def legal(self, drafts: Sequence[int]) -> int:
        return len(drafts)

    def decide(self, row: Row, position: int, ahead: Sequence[int], draft: int | None) -> Choice:
        return Choice(token=choose(row, self.config, position))

    def told(self, token: int, rows: Sequence[Row], place: int) -> Choice:
        return Choice(token=token)

    def is_end(self, token: int) -> bool:
        return False


def pathwise(seeds: int, config: SamplerConfig, proposal: str, tokens: int = 12) -> tuple[int, float]:
    """Return for how many seeds rounds say another text than single steps, and the drafts accepted per round."""
    differing = rounds = accepted = 0
    for seed in range(seeds):
        own = replace(config, seed=seed)
        plain = [START]
        while len(plain) < tokens:
            plain.append(choose(TARGET[plain[-1]], own, len(plain)))
        line, judge, pending = TableLine(), TableJudge(own, proposal), START
        while line.pos < tokens:
            played = play(line, pending, judge, SpecConfig(), costs=None, tokens_left=100)
            line.ids += [pending, *played.tokens[:-1]]
            pending = played.tokens[-1]
            rounds, accepted = rounds + 1, accepted + len(played.tokens) - 1
        differing += line.ids[:tokens] != plain
    return differing, accepted / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60_000)
    parser.add_argument("--seeds", type=int, default=1500)
    args = parser.parse_args()
    started = time.monotonic()
    for name, config in FILTERS.items():
        for q in Q_FILTERS:
            value = p_value(counted(args.rounds, config, of_drafts(config, q)), joint(config))
            sys.stdout.write(f"rule B, p {name}, q {q}: p-value {value:.3f} over {args.rounds} rounds\n")
            assert value > 0.001, (name, q)
    with shared_noise():
        value = p_value(skewed(max(args.rounds, 8000)), np.array(SKEWED_P))  # fewer do not tell
    sys.stdout.write(f"control, shared noise: p-value {value:.2g}\n")
    assert value < 0.001
    value = p_value(counted(args.rounds, NONE, SamplerConfig(top_k=2), with_another_q), joint(NONE))
    sys.stdout.write(f"control, another q: p-value {value:.2g}\n")
    assert value < 0.001
    for name, config in FILTERS.items():
        for proposal in ("coupled", "greedy"):
            differing, accepted = pathwise(args.seeds, config, proposal)
            line = f"rule A, {name}, {proposal} drafts: {differing} of {args.seeds} texts differ"
            sys.stdout.write(f"{line}, {accepted:.2f} accepted per round\n")
            assert differing == 0
    sys.stdout.write(f"{time.monotonic() - started:.0f} s\n")


if __name__ == "__main__":
    main()
