"""Random walks of a chat: whatever was reused, the next reply is what a cold run says.

    python tests/contracts/walks.py --model toy --walks 200 --seed 0
    python tests/contracts/walks.py --model tiny --walks 200 --seed 0

Each step sends, regenerates, edits, forks, rewinds, switches, cancels, saves and opens again, or breaks a run; after
each reply the same prompt is run cold, by the same seed, and ids and caches are compared. Tiny walks go over a new
random checkpoint every few walks, in both formats, rounded and not, with and without a drafter.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from models import KINDS, opened, printable, text

from dsv4nb.errors import EngineError
from dsv4nb.events import Generation
from dsv4nb.model import Model
from dsv4nb.session.reuse import Policy

EAGER = Policy(suffix_limit=0, prefix_floor=1, host_floor=8)  # takes every prefix, however short
POLICIES = {
    "as delivered": Policy(),
    "every prefix": EAGER,
    "anchors only": Policy(suffix_limit=0, prefix_floor=1, live=False, exact=False),
    "live only": Policy(suffix_limit=0, prefix_floor=1, anchors=False, host=False),
    "host only": Policy(suffix_limit=0, prefix_floor=1, host_floor=8, anchors=False),
}
PER_MODEL = 10  # walks on each random checkpoint


class Walk:
    """One chat and what is done with it."""

    def __init__(self, kind: str, model: Model, rng: random.Random, folder: Path) -> None:
        self.kind, self.model, self.rng, self.folder = kind, model, rng, folder
        self.thinking = rng.random() < 0.3
        self.options: dict[str, Any] = {"max_new": rng.randint(1, 12), "temperature": rng.choice((0.0, 1.0, 1.5))}
        if kind == "tiny" and rng.random() < 0.5:
            self.options["logit_bias"] = printable(model)
        if model.limits.spec is not None:
            self.options |= {"spec": False} if rng.random() < 0.2 else {"spec_depth": rng.choice((None, 1, 3, 6))}
        self.chat = model.chat(thinking=self.thinking, system=rng.choice((None, "Be brief.")), **self.options)
        self.kinds: Counter[str] = Counter()

    def text(self) -> str:
        return text(self.kind, self.rng)

    def step(self) -> None:
        """Do one thing, and compare where it gave a reply."""
        rng, turns = self.rng, self.chat.turns
        seed = rng.randint(0, 4)
        move = rng.choice(("send", "send", "regenerate", "edit", "fork", "rewind", "switch", "cancel", "save", "break"))
        if move == "send" or not turns:
            self.check(self.chat.send(self.text(), seed=seed))
        elif move == "regenerate":
            self.check(self.chat.regenerate(seed=seed))
        elif move == "edit":
            self.check(self.chat.edit(rng.randrange(len(turns)), self.text(), seed=seed))
        elif move == "fork":
            self.chat = self.chat.fork()
        elif move == "rewind":
            self.chat.rewind(rng.randint(0, len(turns)))
        elif move == "switch":
            self.chat.switch(rng.randint(1, len(self.chat.branches.nodes)))
        elif move == "cancel":
            self.cancel()
        elif move == "save":
            self.chat.save(self.folder / "chat.dsv4")
            if rng.random() < 0.5:
                self.model.cache.clear()  # nothing runs: as in a new kernel
            self.chat = self.model.open_chat(self.folder / "chat.dsv4")
        else:
            self.fail()
        self.kinds[move] += 1

    def cancel(self) -> None:
        """Stop a turn after some tokens, or before its first one."""
        ticket = self.chat.submit(self.text(), seed=1, max_new=60)
        wanted = self.rng.randint(0, 6)
        while len(ticket.poll(0)[0]) < wanted and not ticket.wait(0.0005):
            pass
        ticket.cancel()
        ticket.wait()

    def fail(self) -> None:
        """Break a run at a random call of the engine; the chat goes on as if it had not been."""
        engine: Any = self.model.engine
        name = self.rng.choice(("prefill", "forward_rows", "commit", "capture", "restore", "new_state"))
        real, left = getattr(engine, name), self.rng.randint(0, 3)

        def broken(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise RuntimeError(f"{name} broke")
            return real(*args, **kwargs)

        before = self.chat.messages
        setattr(engine, name, broken)
        try:
            self.chat.send(self.text(), seed=2)
        except EngineError:
            assert self.chat.messages == before
        finally:
            delattr(engine, name)

    def check(self, reply: Generation) -> None:
        """Run the same prompt cold, and compare ids and caches."""
        assert reply.done.reuse is not None
        self.kinds[reply.done.reuse.kind] += 1
        assert reply.done.n_cached == reply.done.reuse.length
        cold = self.model.replay(reply.recipe)
        assert cold.ids == reply.ids and cold.done.reuse is not None and cold.done.reuse.kind == "reset"
        left, right = self.model._parts.server.do(lambda engine, prefixes: self.digests(engine, prefixes, reply))
        assert left == right, reply.done.reuse

    @staticmethod
    def digests(engine: Any, prefixes: Any, reply: Generation) -> tuple[str, str]:
        """Digests of the caches that the reply left, and of a cold run of the same ids."""
        anchors = [a for a in prefixes._anchors.committed if reply.all_ids[: len(a.ids)] == a.ids]
        if not anchors:
            return "", ""
        anchor = max(anchors, key=lambda a: len(a.ids))
        warm, cold = engine.restore(anchor.snapshot), engine.new_state()
        engine.prefill(cold, anchor.ids)
        found = warm.digest(), cold.digest()
        engine.release(warm)
        engine.release(cold)
        return found


def run(kind: str, walks: int, steps: int, seed: int) -> Counter[str]:
    """Walk, and return how often each move and each start happened."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, walks, walks if kind == "toy" else PER_MODEL):
            last = walks if kind == "toy" else min(first + PER_MODEL, walks)
            number = seed * 1000 + first // PER_MODEL
            with opened(kind, Path(folder), number, host_cache_mib=64, name="walks") as model:
                for walk in range(first, last):
                    counts += walk_once(kind, model, steps, f"{seed}/{walk}", Path(folder))
                model.cache.clear()
                assert model.engine.blocks_in_use == 0, "blocks were left"
    return counts


def walk_once(kind: str, model: Model, steps: int, seed: str, folder: Path) -> Counter[str]:
    """Walk one chat."""
    rng = random.Random(seed)
    name = rng.choice(list(POLICIES))
    model.cache.policy = POLICIES[name]
    walk = Walk(kind, model, rng, folder)
    try:
        for _ in range(steps):
            walk.step()
    except BaseException:
        sys.stderr.write(f"walk {seed} of {model.name}, policy {name}, chat\n{walk.chat.branches}\n")
        raise
    return walk.kinds


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=KINDS, default="toy")
    parser.add_argument("--walks", type=int, default=200)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    counts = run(args.model, args.walks, args.steps, args.seed)
    for name, count in sorted(counts.items()):
        print(f"{name:12}{count:7}")
    print(
        f"{args.walks} {args.model} walks of {args.steps} steps, seed {args.seed}, "
        f"{time.monotonic() - started:.0f} s: no difference"
    )


if __name__ == "__main__":
    main()
