"""What rounds of speculation add up to, under the names of vLLM, DeepSpec and the DSpark paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsv4nb.rounds.records import Round
from dsv4nb.tables import Facts, Grid, as_html, as_text, decimal, percent

Curve = tuple[float | None, ...]

_STEPS = ("draft", "verify", "commit", "total")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecTotals:
    """What rounds add up to.

    Rates are over the rounds that verified at least one draft. A draft that was not verified, be it for the window,
    the depth or the budget, is no rejection: no rate counts it, except that `position_rates` is over rounds and so
    takes it for not accepted. A draft that was accepted past a stop string counts as such everywhere but in the tokens;
    one behind an end token was not judged and is in no curve.

    Curves have a number per draft of the longest block, None where nothing was counted; [0] is the first draft.

    Attributes:
        rounds: all of them; `verifying` those with a verified draft; `cut` those that the budget shortened.
        drafted: drafts that were verified; `not_verified` those that were not.
        emitted: tokens that the rounds added.
        accepts: [a]: verifying rounds that accepted exactly a drafts.
        proposals: [k]: rounds that verified draft k + 1 and could accept it.
        trials: [k]: of these, the rounds that accepted the k drafts before it.
        ms: mean of a round, by step, over the rounds that measured it.
        tokens_per_s: over the rounds whose total time was measured, None when none was.
        plain_ms: mean of a token on the plain route, as the rounds estimated it; None when it was not measured.
        speed_up: estimated time of the same tokens on the plain route, by the time they took; None likewise.
    """

    rounds: int
    verifying: int
    cut: int
    drafted: int
    not_verified: int
    accepted: int
    emitted: int
    accepts: tuple[int, ...]
    proposals: tuple[int, ...]
    trials: tuple[int, ...]
    ms: Mapping[str, float]
    tokens_per_s: float | None
    plain_ms: float | None
    speed_up: float | None

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> SpecTotals:
        """Return the totals; of no rounds they are zeros and None."""
        verifying = [r for r in rounds if r.verified]
        block = max((len(r.drafts) for r in rounds), default=0)
        accepts = Counter(r.accepts for r in verifying)
        drafted = sum(r.verified for r in verifying)
        measured = [(r, r.ms["total"]) for r in rounds if r.ms.get("total", 0) > 0]
        compared = [(r.emitted * r.plain_ms, ms) for r, ms in measured if r.plain_ms is not None]
        return cls(
            rounds=len(rounds),
            verifying=len(verifying),
            cut=sum(r.t_batch < r.t_cap for r in rounds),
            drafted=drafted,
            not_verified=sum(len(r.drafts) for r in rounds) - drafted,
            accepted=sum(r.accepts for r in verifying),
            emitted=sum(r.emitted for r in rounds),
            accepts=tuple(accepts[a] for a in range(block + 1)),
            proposals=tuple(sum(r.judged > k for r in verifying) for k in range(block)),
            trials=tuple(sum(r.judged > k <= r.accepts for r in verifying) for k in range(block)),
            ms={name: ms for name in _STEPS if (ms := _mean([r.ms[name] for r in rounds if name in r.ms])) is not None},
            tokens_per_s=_ratio(1000 * sum(r.emitted for r, _ in measured), sum(ms for _, ms in measured)),
            plain_ms=_mean([r.plain_ms for r in rounds if r.plain_ms is not None]),
            speed_up=_ratio(sum(plain for plain, _ in compared), sum(ms for _, ms in compared)),
        )

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted by verified drafts; vLLM's average draft acceptance rate."""
        return _ratio(self.accepted, self.drafted)

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted drafts per verifying round, the model's own token included; the papers' tau."""
        return None if not self.verifying else 1 + self.accepted / self.verifying

    @property
    def position_rates(self) -> Curve:
        """Unconditional: verifying rounds that accepted draft k, by all of them; their sum + 1 is the mean length.

        A round that did not verify draft k counts as one that did not accept it.
        """
        return tuple(_ratio(n, self.verifying) for n in self._accepted_at)

    @property
    def position_rates_over_proposals(self) -> Curve:
        """Rounds that accepted draft k, by the rounds that verified it; DeepSpec's accept_rate@k.

        Where the window or the budget kept draft k from being run, the round does not count.
        """
        return tuple(map(_ratio, self._accepted_at, self.proposals))

    @property
    def position_rates_conditional(self) -> Curve:
        """Rounds that accepted draft k, by those that verified it and accepted all before it: the drafter's quality.

        Where the window or the budget kept draft k from being run, the round does not count.
        """
        return tuple(map(_ratio, self._accepted_at, self.trials))

    @property
    def verify_rate(self) -> float | None:
        """Accepted drafts and the model's own tokens, by the rows run, of the verifying rounds; DeepSpec's name."""
        return _ratio(self.accepted + self.verifying, self.drafted + self.verifying)

    @property
    def tokens_per_round(self) -> float | None:
        """Emitted tokens by rounds, those without a verified draft included, tokens past the stop not."""
        return _ratio(self.emitted, self.rounds)

    @property
    def _accepted_at(self) -> tuple[int, ...]:
        return tuple(sum(self.accepts[k:]) for k in range(1, len(self.accepts)))

    def rows(self) -> Facts:
        """Return the totals as (label, text)."""
        if not self.rounds:
            return [("rounds", "none: nothing was speculated")]
        verified = f"{self.accepted} of {self.drafted} verified accepted ({percent(self.acceptance_rate)})"
        facts = [
            ("rounds", f"{self.rounds:,}, {self.verifying:,} with verified drafts, {self.cut:,} cut by the budget"),
            ("drafts", f"{verified}, {self.not_verified:,} not verified"),
            ("length", f"{decimal(self.mean_acceptance_length)} tokens, mean acceptance length"),
            ("rows", f"{percent(self.verify_rate)} of the rows of these rounds were kept"),
            ("tokens", f"{self.emitted:,}, {decimal(self.tokens_per_round)} a round"),
        ]
        if self.tokens_per_s is not None:
            facts.append(("speed", f"{self.tokens_per_s:.1f} tokens/s"))
        if self.ms:
            facts.append(("ms a round", ", ".join(f"{name} {ms:.2f}" for name, ms in self.ms.items())))
        if self.speed_up is not None:
            told = f"{self.speed_up:.2f} times the plain route ({decimal(self.plain_ms)} ms a token), estimated"
            facts.append(("speed-up", told))
        return facts

    def grid(self) -> Grid:
        """Return the table of the accepted drafts by position, empty when nothing was verified."""
        if not self.verifying:
            return []
        curves = {
            "accepted, of rounds": self.position_rates,
            "of verified": self.position_rates_over_proposals,
            "of reached": self.position_rates_conditional,
        }
        return [
            ["draft", "none", *(str(k) for k in range(1, len(self.accepts)))],
            *([name, "", *map(percent, curve)] for name, curve in curves.items()),
            ["rounds that end there", *map(str, self.accepts)],
        ]

    def __str__(self) -> str:
        return as_text(self.rows(), self.grid())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self.rows(), self.grid())


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: Sequence[float]) -> float | None:
    return _ratio(sum(values), len(values))
