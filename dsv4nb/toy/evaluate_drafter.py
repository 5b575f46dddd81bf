"""Speculation over the held-out questions, through the product: `python -m dsv4nb.toy.evaluate_drafter`.

Every question is asked once per arm, the arms in turn within one process, so that what slows the machine slows all of
them. Times are of the tokens behind the first one. In the exact arms the reply must be the plain route's.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.events import Generation
from dsv4nb.model import Model, load
from dsv4nb.rounds import Rounds
from dsv4nb.toy.corpus.tasks import Conversation
from dsv4nb.toy.probes import held_out_conversations

MUST = {"greedy": 3.0, "T 1, coupled": 2.3}  # tokens per round
MUST_AUC, MUST_RATIO = 0.75, 1.3  # of the greedy arm

ARMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"temperature": 0.0, "spec": False},
    "greedy": {"temperature": 0.0},
    "greedy, auto": {"temperature": 0.0, "spec_window": "auto"},
    "T 1, plain": {"temperature": 1.0, "spec": False},
    "T 1, coupled": {"temperature": 1.0},
    "T 1, greedy drafts": {"temperature": 1.0, "spec_proposal": "greedy"},
    "T 1, rejection": {"temperature": 1.0, "spec_mode": "rejection"},
}
_PLAIN = {name: "T 1, plain" if name.startswith("T 1") else "plain" for name in ARMS}


@dataclass(slots=True)
class Arm:
    """What one way of decoding came to.

    Attributes:
        tokens, seconds: behind the first token of each reply.
        by_skill: rounds per skill and mode.
    """

    tokens: int = 0
    seconds: float = 0.0
    rounds: Rounds = field(default_factory=Rounds)
    by_skill: dict[str, Rounds] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Of all replies together."""
        return self.tokens / max(self.seconds, 1e-9)

    def add(self, reply: Generation, skill: str) -> None:
        """Count a reply."""
        if reply.timings.decode_s is not None and len(reply.ids) > 1:
            self.tokens += len(reply.ids) - 1
            self.seconds += reply.timings.decode_s
        self.rounds += reply.rounds
        self.by_skill[skill] = self.by_skill.get(skill, Rounds()) + reply.rounds


def ask(model: Model, conversation: Conversation, *, thinking: bool, seed: int, way: Mapping[str, Any]) -> Generation:
    """Send the conversation without its last answer."""
    messages: list[dict[str, Any]] = [dict(m) for m in conversation.messages[:-1]]
    tools = messages[0].pop("tools", None)
    messages[0].pop("response_format", None)  # what a grammar forces is no merit of the drafter's
    return model.generate(messages=messages, tools=tools, thinking=thinking, max_new=200, seed=seed, **way)


def evaluate(model: Model, count: Any, *, seed: int, many: int, facts: int) -> dict[str, Arm]:
    """Ask `facts` facts and `many` questions of each other skill, in both modes.

    Raises:
        AssertionError: an exact arm has another reply than the plain route.
    """
    drawn = list(held_out_conversations(seed, count, many))
    known = [one for one in drawn if one[0] == "facts"]
    asked = random.Random(seed).sample(known, min(facts, len(known))) + [one for one in drawn if one[0] != "facts"]
    arms = {name: Arm() for name in ARMS}
    ask(model, asked[0][1], thinking=False, seed=0, way=ARMS["greedy, auto"])  # measures the costs, warms up
    for number, (skill, conversation) in enumerate(asked):
        for thinking in (False, True):
            said: dict[str, Generation] = {}
            for name, way in ARMS.items():
                said[name] = ask(model, conversation, thinking=thinking, seed=number, way=way)
                arms[name].add(said[name], f"{skill}/{'thinking' if thinking else 'chat'}")
            for name, reply in said.items():
                if name != "T 1, rejection":
                    assert reply.ids == said[_PLAIN[name]].ids, (name, number, thinking)
    return arms


def table(arms: Mapping[str, Arm]) -> list[str]:
    """Return the lines of the report."""
    lines = [f"{'arm':20}{'tokens':>8}{'rounds':>8}{'tau':>7}{'tok/s':>8}{'ratio':>7}  accepted of rounds, by position"]
    for name, arm in arms.items():
        ratio = arm.tokens_per_s / arms[_PLAIN[name]].tokens_per_s
        line = f"{name:20}{arm.tokens:8}{len(arm.rounds):8}"
        if not arm.rounds:
            lines.append(f"{line}{'':7}{arm.tokens_per_s:8.1f}{ratio:7.2f}")
            continue
        totals = arm.rounds.totals
        curve = " ".join(_share(share) for share in totals.position_rates)
        lines.append(f"{line}{totals.mean_acceptance_length or 1:7.2f}{arm.tokens_per_s:8.1f}{ratio:7.2f}  {curve}")
        lines.append(f"{'':58}  {' '.join(_share(s) for s in totals.position_rates_conditional)}  given those before")
    for name in ("greedy", "T 1, coupled"):
        found = arms[name].rounds.calibration().conf
        at = " ".join(_share(one.auc) for one in arms[name].rounds.calibration().conf_at)
        lines.append(f"confidence, {name}: AUC {_share(found.auc)} ({at} by position), ECE {_share(found.ece)}")
    by_skill = {skill: rounds.totals.mean_acceptance_length for skill, rounds in arms["greedy"].by_skill.items()}
    lines.append("greedy tau by skill: " + ", ".join(f"{skill} {tau or 1:.2f}" for skill, tau in by_skill.items()))
    return lines


def missed(arms: Mapping[str, Arm]) -> list[str]:
    """Return what was asked for and not reached."""
    out = [
        f"tau of {name} is below {least}"
        for name, least in MUST.items()
        if (arms[name].rounds.totals.mean_acceptance_length or 1) < least
    ]
    if (arms["greedy"].rounds.calibration().conf.auc or 0) < MUST_AUC:
        out.append(f"the confidence's AUC is below {MUST_AUC}")
    if arms["greedy"].tokens_per_s < MUST_RATIO * arms["plain"].tokens_per_s:
        out.append(f"speculation is less than {MUST_RATIO} times as fast as the plain route")
    return out


def _share(value: float | None) -> str:
    return "   -" if value is None else f"{value:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table; leave with 1 when something is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="toy")
    parser.add_argument("--devices", metavar="IDS", help="as of load(): cpu, or GPU ids such as 0,1")
    parser.add_argument("--placement", help="likewise")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--many", type=int, default=16, help="questions of each skill but facts")
    parser.add_argument("--facts", type=int, default=48)
    args = parser.parse_args(arguments)
    started = time.monotonic()
    with load(args.model, devices=args.devices, placement=args.placement, drafter=True) as model:
        device = model.info.device
        count = ChatTokenizer.from_file(f"{model.info.path}/tokenizer.json").count
        arms = evaluate(model, count, seed=args.seed, many=args.many, facts=args.facts)
    failed = missed(arms)
    for line in [*table(arms), f"{device}, seed {args.seed}, {time.monotonic() - started:.0f} s", *failed]:
        print(line)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
