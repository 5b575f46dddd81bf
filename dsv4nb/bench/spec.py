"""What speculation makes of a model's own replies: the plain route and rounds in turn, on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4nb.bench.spread import Spread
from dsv4nb.errors import Dsv4Error
from dsv4nb.events import Generation
from dsv4nb.model import Model, load
from dsv4nb.rounds import Rounds

PROMPTS = (
    "What is the capital of France?",
    "Tell me a story about a fox.",
    "What is 47 + 38?",
    "Why is the sky blue?",
    "How many minutes are 3 hours?",
    "Count from 1 to 30.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `spec` measured.

    Attributes:
        plain_tok_s, spec_tok_s: tokens after the first one, per second, of all replies of a run together.
        tokens_per_round: mean acceptance length, the model's own token counted.
        accepted: share of the rounds that accepted the draft at each position.
        draft_ms, verify_ms: of a block of drafts, and of a forward of 1, 2, … rows.
    """

    model: str
    device: str
    temperature: float
    prompts: int
    tokens: int
    runs: int
    plain_tok_s: Spread
    spec_tok_s: Spread
    tokens_per_round: float
    accepted: tuple[float | None, ...]
    draft_ms: float | None
    verify_ms: tuple[float, ...]

    def rows(self) -> list[tuple[str, str]]:
        """Return the measurements as (label, text)."""
        asked = f"{self.prompts} prompts, temperature {self.temperature:g}, {self.tokens} tokens, {self.runs} runs"
        shares = ", ".join("-" if share is None else f"{share:.2f}" for share in self.accepted)
        return [
            ("model", f"{self.model} on {self.device}"),
            ("asked", asked),
            ("plain", f"{self.plain_tok_s} tok/s"),
            ("speculated", f"{self.spec_tok_s} tok/s, {self.ratio:.2f} times"),
            ("tokens a round", f"{self.tokens_per_round:.2f}"),
            ("accepted", f"{shares} of the rounds, by position"),
            ("draft", f"{self.draft_ms:.2f} ms"),
            ("verify", f"{', '.join(f'{ms:.2f}' for ms in self.verify_ms)} ms with 1, 2, … rows"),
        ]

    @property
    def ratio(self) -> float:
        """Speculated by plain, of the medians."""
        return self.spec_tok_s.median / self.plain_tok_s.median

    def __str__(self) -> str:
        return "\n".join(f"{label:<16}{value}" for label, value in self.rows())


def spec(path: str, *, temperature: float = 0.0, new: int = 64, runs: int = 3) -> Report:
    """Load a model with its drafter and `compare` its two routes.

    Raises:
        CheckpointError, RequestError: it has no drafter that runs.
        Dsv4Error: as `compare`.
    """
    with load(path, drafter=True) as model:
        return compare(model, temperature=temperature, new=new, runs=runs)


def compare(
    model: Model, prompts: Sequence[str] = PROMPTS, *, temperature: float = 0.0, new: int = 64, runs: int = 3
) -> Report:
    """Let a model answer the prompts plainly and by rounds, in turn; one turn before the first measured one.

    Raises:
        RequestError: the model has no drafter.
        Dsv4Error: the two routes say different texts.
    """
    costs = model.measure_spec()
    plain: list[float] = []
    rounds: list[float] = []
    seen, tokens = Rounds(), 0
    for run in range(runs + 1):
        pairs = []
        for number, prompt in enumerate(prompts):
            one, other = (
                model.generate(prompt, temperature=temperature, seed=number, max_new=new, spec=is_on)
                for is_on in (False, True)
            )
            if one.ids != other.ids:
                raise Dsv4Error(f"speculation changed the reply to {prompt!r}; please report it, with %dsv4 doctor")
            pairs.append((one, other))
        if run:
            plain.append(_rate([one for one, _ in pairs]))
            rounds.append(_rate([other for _, other in pairs]))
            seen = sum((other.rounds for _, other in pairs), seen)
            tokens = sum(len(one.ids) for one, _ in pairs)
    totals = seen.totals
    return Report(
        model=model.name,
        device=model.info.device,
        temperature=temperature,
        prompts=len(prompts),
        tokens=tokens,
        runs=runs,
        plain_tok_s=Spread.of(plain),
        spec_tok_s=Spread.of(rounds),
        tokens_per_round=totals.mean_acceptance_length or 1.0,
        accepted=totals.position_rates,
        draft_ms=costs.draft_ms,
        verify_ms=costs.verify_ms,
    )


def _rate(replies: Sequence[Generation]) -> float:
    counted = [one for one in replies if one.timings.decode_s]
    return sum(len(one.ids) - 1 for one in counted) / sum(one.timings.decode_s or 0.0 for one in counted)
