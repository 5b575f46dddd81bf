"""Speculation changes no text: thousands of replies, each against the plain route.

    python tests/contracts/speculation.py --generations 2000 --seed 0

Draws requests over prompts, samplers, penalties, biases, grammars and stops, and ways to speculate over drafters
(the model's own, random, constant, an oracle, wrong at one slot, right now and then), depths, windows and proposals;
the reply must have the ids of the plain route, and leave caches that a cold run of the same ids leaves.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from dsv4nb.engine.protocol import ChooseDraft, DecodeState, Engine, Proposal
from dsv4nb.events import Generation
from dsv4nb.model import Model, load
from dsv4nb.testing.scripted_drafter import ScriptedDrafter, drafted_model

PROMPTS = (
    "What is the capital of France?",
    "Hi!",
    "Why is the sky blue?",
    "Tell me a story about a fox.",
    "What is 63 - 27?",
    "Say: purple rain in Berlin",
    "How many minutes are 3 hours?",
    "Emma has a red kite. Tom lives in Oslo. Where does Tom live?",
)
LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 130, 255, 256, 257)  # of prompts given as ids
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.2}
REGEXES = ("[A-Z][a-z ]{3,20}", "(yes|no|maybe)", "[0-9]{1,4}")


class Blind(ScriptedDrafter):
    """Drafts without looking: one id over and over, or random ones."""

    def __init__(self, constant: int | None, seed: int = 0) -> None:
        super().__init__(0.0, (0.9, 0.5, 0.7, 0.3, 0.6))
        self._constant, self._ids = constant, random.Random(seed)

    def draft(self, engine: Engine, state: DecodeState, pending: int, choose: ChooseDraft) -> Proposal:
        drawn = [self._ids.randrange(engine.vocab_size) for _ in range(self.block_size)]
        ids = drawn if self._constant is None else [self._constant] * self.block_size
        return Proposal(ids=tuple(ids), conf_logits=self._conf_logits)


def drafters(seed: int) -> dict[str, ScriptedDrafter]:
    """The drafters beside the model's own."""
    confidences = (0.95, 0.8, 0.6, 0.45, 0.2)
    named: dict[str, ScriptedDrafter] = {
        "random": Blind(None, seed),
        "constant": Blind(300),
        "oracle": ScriptedDrafter(1.0, confidences),
        "never right": ScriptedDrafter(0.0, confidences),
        "right at 0.5": ScriptedDrafter(0.5, confidences, seed=seed),
        "right at 0.9": ScriptedDrafter(0.9, confidences, seed=seed),
    }
    for slot in range(5):
        named[f"wrong at {slot + 1}"] = ScriptedDrafter([0.0 if i == slot else 1.0 for i in range(5)], confidences)
    return named


def a_request(rng: random.Random, vocabulary: int) -> dict[str, Any]:
    """Draw what is asked for; nothing of it depends on the route."""
    asked: dict[str, Any] = {"max_new": rng.choice((1, 2, 5, 13, 24, 40)), "seed": rng.randrange(5)}
    if rng.random() < 0.4:
        asked["prompt_ids"] = [rng.randrange(260, vocabulary) for _ in range(rng.choice(LENGTHS))]
    else:
        asked["prompt"] = rng.choice(PROMPTS)
        asked["thinking"] = rng.random() < 0.3
    asked["temperature"] = rng.choice((0.0, 0.0, 0.7, 1.0, 1.0, 1.5))
    if rng.random() < 0.4:
        asked |= rng.choice(({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.8, "min_p": 0.02}))
    if rng.random() < 0.35:
        asked |= PENALTIES | {"penalty_last_n": rng.choice((0, 16, 64, 256))}
        asked["penalty_scope"] = rng.choice(("all", "generated"))
    if rng.random() < 0.15:
        asked["logit_bias"] = {rng.randrange(260, vocabulary): rng.uniform(-5, 8) for _ in range(3)}
    if rng.random() < 0.15:
        asked["regex"] = rng.choice(REGEXES)
    if rng.random() < 0.2 and "regex" not in asked:
        asked["stop"] = rng.choice((" the", ".", "is", " a"))
    if rng.random() < 0.1:
        asked["sampler"] = "inverse_cdf"
    if rng.random() < 0.1:
        asked["logprobs"] = 2
    return asked


def a_way(rng: random.Random) -> dict[str, Any]:
    """Draw a way to speculate, always an exact one."""
    way: dict[str, Any] = {"spec_depth": rng.choice((None, None, 1, 2, 3, 4, 5, 6))}
    tau = rng.choice((0.3, 0.5, 0.7, 0.9))
    way["spec_window"] = rng.choice((None, "off", "auto", ("slot", tau), ("slot", tau, rng.randrange(5))))
    way["spec_proposal"] = rng.choice((None, "coupled", "greedy"))
    return way


def compare(plain: Generation, spoken: Generation, what: Sequence[object]) -> None:
    """Raise when anything that a person can see is another."""
    for name in ("ids", "text", "reasoning", "raw_text", "stop_reason", "logprobs", "tool_calls"):
        if getattr(plain, name) != getattr(spoken, name):
            raise AssertionError(f"{name} differs\n{getattr(plain, name)}\n{getattr(spoken, name)}\n{what}")
    rounds = spoken.rounds
    if rounds:
        assert spoken.done.route.startswith("spec") and spoken.done.spec is not None
        grown = 1 + sum(one.emitted for one in rounds)
        assert grown == len(spoken.ids), (grown, len(spoken.ids), what)
        for one in rounds:
            assert one.accepts <= one.judged <= one.verified <= len(one.drafts), (one, what)
            assert one.t_batch <= one.t_cap <= one.vt_drafts + 1, (one, what)


def run(generations: int, seed: int, names: Sequence[str] = ()) -> Counter[str]:
    """Compare so many replies; return how often each drafter spoke, and the drafts verified and accepted."""
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        plain = stack.enter_context(load("toy", name="speculation", drafter=False))
        models: dict[str, Model] = {}
        if not names or "its own" in names:
            models["its own"] = stack.enter_context(load("toy", name="speculation", drafter=True))
        for name, drafter in drafters(seed).items():
            if not names or name in names:
                models[name] = stack.enter_context(drafted_model("toy", drafter))
        for number in range(generations):
            rng = random.Random(f"{seed}/{number}")
            asked = a_request(rng, plain.limits.vocab_size)
            name = "its own" if "its own" in models and rng.random() < 0.5 else rng.choice(list(models))
            way = a_way(rng)
            expected = plain.generate(**asked)
            spoken = models[name].generate(**asked, **way)
            compare(expected, spoken, (number, seed, name, asked, way))
            counts[name] += 1
            counts["tokens"] += len(spoken.ids)
            if spoken.done.spec is not None:
                counts["rounds"] += spoken.done.spec.rounds
                counts["drafts verified"] += spoken.done.spec.drafted
                counts["drafts accepted"] += spoken.done.spec.accepted
    return counts


def walk(rounds: int, seed: int, name: str, drafter: ScriptedDrafter | None) -> int:
    """Play rounds of one long chat turn after turn; after each the caches are those of a cold run. Return the turns."""
    rng, turns = random.Random(f"{seed}/{name}"), 0
    with load("toy", name="walk") if drafter is None else drafted_model("toy", drafter) as model:
        chat, played = model.chat(temperature=1.0, max_new=60), 0
        while played < rounds:
            if len(chat.turns) > 12:
                chat = model.chat(temperature=1.0, max_new=60)
            reply = chat.send(rng.choice(PROMPTS), seed=rng.randrange(1000))
            played, turns = played + len(reply.rounds), turns + 1
            warm, cold = model._parts.server.do(partial(_digests, reply))
            assert reply.rounds and warm == cold, (name, turns)
    return turns


def _digests(reply: Generation, engine: Any, prefixes: Any) -> tuple[str, str]:
    (anchor,) = [a for a in prefixes._anchors.committed if a.ids == (*reply.all_ids,)[: len(a.ids)]][-1:]
    warm, cold = engine.restore(anchor.snapshot), engine.new_state()
    engine.prefill(cold, anchor.ids)
    found = warm.digest(), cold.digest()
    engine.release(warm)
    engine.release(cold)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generations", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=300, help="of the walk of each drafter")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    counts = run(args.generations, args.seed)
    told = ", ".join(f"{n} {name}" for name, n in counts.most_common())
    sys.stdout.write(f"{args.generations} generations, 0 differences, {time.monotonic() - started:.0f} s: {told}\n")
    for name in ("its own", "right at 0.5", "random"):
        drafter = None if name == "its own" else drafters(args.seed)[name]
        started = time.monotonic()
        turns = walk(args.rounds, args.seed, name, drafter)
        seconds = time.monotonic() - started
        sys.stdout.write(f"walk, {name}: {args.rounds} rounds in {turns} turns, caches equal, {seconds:.0f} s\n")


if __name__ == "__main__":
    main()
