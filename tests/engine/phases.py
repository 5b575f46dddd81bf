"""Rolling back at every phase of a compressed window, for every width and accepted count (dspark.md 10.3).

    python tests/engine/phases.py --step 1 --rounds 300

On the frozen checkpoint with a drafter: after a forward of T rows of which n are kept, the digest of all live caches,
the drafter's rings among them, is that of n single steps, and the kept rows' logits are the same bits. Then rounds of
random width and accepted count, against one prefill of what they kept.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.contract import FP32_FULL
from dsv4nb.engine.cpu import CpuEngine

DATA = Path(__file__).parents[1] / "data"
START, WIDEST = 129, 6  # every phase of both ratios, past the first window


def engine_of(folder: Path) -> CpuEngine:
    """Return an engine on the frozen trunk and drafter, with all roundings."""
    for file in (
        DATA / "goldens" / "checkpoint" / "model.safetensors",
        *(DATA / "goldens_dspark/checkpoint").iterdir(),
    ):
        (folder / file.name).symlink_to(file)
    checkpoint = open_checkpoint(folder, require_tokenizer=False)
    return CpuEngine.from_checkpoint(checkpoint, contract=FP32_FULL, max_seq=4096)


def ids(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(8, 250) for _ in range(n)]


def phase(engine: CpuEngine, start: int) -> int:
    """Compare all widths and counts behind `start` positions; return how many."""
    state = engine.new_state()
    engine.prefill(state, ids(start, 0))
    snapshot, ahead, compared = engine.capture(state), ids(WIDEST, start), 0
    digests, rows = [state.digest()], []
    for token in ahead:
        rows.append(engine.forward_rows(state, [token])[0])
        engine.commit(state, 1)
        digests.append(state.digest())
    for width in range(1, WIDEST + 1):
        for kept in range(1, width + 1):
            other = engine.restore(snapshot)
            found = engine.forward_rows(other, [*ahead[:kept], *[9] * (width - kept)])
            assert all(np.array_equal(found[i], rows[i]) for i in range(kept)), (start, width, kept)
            engine.commit(other, kept)
            assert other.digest() == digests[kept], (start, width, kept)
            engine.release(other)
            compared += 1
    return compared


def walk(engine: CpuEngine, rounds: int, seed: int) -> int:
    """Play rounds with drafts in between; return the positions they came to."""
    rng, state, single = random.Random(seed), engine.new_state(), engine.new_state()
    for one in (state, single):
        engine.prefill(one, ids(3, seed))
    for number in range(rounds):
        width = rng.randint(1, WIDEST)
        kept = rng.randint(1, width)
        tokens = [rng.randrange(8, 250) for _ in range(width)]
        engine.draft(state, tokens[0], lambda row, slot, ahead: int(row.argmax()))
        engine.forward_rows(state, tokens)
        engine.commit(state, kept)
        engine.prefill(single, tokens[:kept])
        if number % 10 == 9:
            assert state.digest() == single.digest(), number
    assert state.digest() == single.digest()
    return state.pos


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", type=int, default=1, help="positions between the phases that are tried, of 128")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine, began = engine_of(Path(folder)), time.monotonic()
        phases = range(START, START + 128, args.step)
        compared = sum(phase(engine, start) for start in phases)
        sys.stdout.write(f"{len(phases)} phases, {compared} rollbacks, all equal, {time.monotonic() - began:.0f} s\n")
        began = time.monotonic()
        reached = walk(engine, args.rounds, args.seed)
        took = time.monotonic() - began
        sys.stdout.write(f"{args.rounds} rounds to position {reached}, caches equal, {took:.0f} s\n")


if __name__ == "__main__":
    main()
