"""Many turns with random cancels: memory at the end is what it was after the first ones.

python tests/contracts/thousand_turns.py --turns 1000 --seed 0
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time

from dsv4nb.model import Model, load

FIRST = 50
# one reading says little: what chats and caches hold, and what malloc keeps, goes up and down by 3 %
EVERY, READINGS = 10, 6
ALLOWED = 1.05


def resident_mb() -> float:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


def turn(model: Model, chats: list[object], rng: random.Random) -> None:
    """One turn of one of a few chats, cancelled now and then; long chats are begun anew."""
    i = rng.randrange(len(chats))
    chat = chats[i]
    if len(chat.turns) > 12:  # type: ignore[attr-defined]
        chat = chats[i] = model.chat(temperature=1.0, max_new=12)
    text = " ".join(rng.choice(("Anna", "went", "to", "Rome", "on", "Monday")) for _ in range(rng.choice((2, 20, 80))))
    ticket = chat.submit(text)  # type: ignore[attr-defined]
    if rng.random() < 0.3:
        ticket.wait(rng.random() * 0.05)
        ticket.cancel()
    ticket.wait()


def run(turns: int, seed: int, cache_mib: float) -> tuple[float, float]:
    """Return resident megabytes after the first turns and after all, each the median of a few readings."""
    rng = random.Random(seed)
    readings: list[float] = []
    with load("toy", cache_mib=cache_mib, name="turns") as model:
        chats: list[object] = [model.chat(temperature=1.0, max_new=12) for _ in range(4)]
        for n in range(1, turns + 1):
            turn(model, chats, rng)
            if n >= FIRST and n % EVERY == 0:
                gc.collect()
                readings.append(resident_mb())
    return statistics.median(readings[:READINGS]), statistics.median(readings[-READINGS:])


def main() -> None:
    """Print the memory, and leave with 1 when it grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    # full long before the first measurement: what the budget allows to fill is no growth
    parser.add_argument("--cache-mib", type=float, default=8.0)
    args = parser.parse_args()
    started = time.monotonic()
    early, late = run(args.turns, args.seed, args.cache_mib)
    print(f"{early:.1f} MB from turn {FIRST} on, {late:.1f} MB after {args.turns}: {late / early - 1:+.1%}, "
          f"{time.monotonic() - started:.0f} s")  # fmt: skip
    sys.exit(late > ALLOWED * early)


if __name__ == "__main__":
    main()
