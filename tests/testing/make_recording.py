"""Makes tests/data/recording.json from the bundled model: `python tests/testing/make_recording.py [FILE [DEVICES]]`.

A chat of three turns, one of them thinking and one not speculated, another answer to the first question, and that
answer continued from one of its alternatives.
"""

from __future__ import annotations

import sys
from pathlib import Path

import dsv4nb
from dsv4nb.testing.recorder import record

PATH = Path(__file__).parents[1] / "data/recording.json"
STORY, SUM, CAPITAL = (
    "Tell me a story about a dragon and a clock.",
    "What is 47 + 38?",
    "What is the capital of France?",
)


def make(path: Path, devices: str | None = None) -> int:
    """Write the recording of a model on `devices`; return its bytes."""
    with dsv4nb.load("toy", devices=devices) as model:
        chat = model.chat(temperature=1.6, min_p=0.004, seed=1, logprobs=5)
        turns = [
            chat.send(STORY, max_new=110),
            chat.send(SUM, thinking=True, max_new=80, temperature=1.0, min_p=0.0),
            chat.send(CAPITAL, spec=False, temperature=0, min_p=0.0),
        ]
        other = model.chat(temperature=1.6, min_p=0.004, seed=0, logprobs=5)
        again = other.send(STORY, max_new=40)
        # where the model was least sure, its second choice
        token = max(range(len(again.ids)), key=lambda i: again.logprobs[i].entropy)
        alternative = next(one for one, _ in again.logprobs[token].top if one != again.ids[token])
        continued = other.continue_from(0, token, alternative, max_new=24)
        record([*turns, again, continued], path, model=model)
    return path.stat().st_size


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PATH
    print(f"{path}: {make(path, *sys.argv[2:3]):,} bytes")
