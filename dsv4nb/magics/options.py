"""The words of the magics that stand for keywords of `generate` and of `load`: one table of each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_WINDOWS = "off, auto, slot, slot:TAU or slot:TAU:FLOOR"


@dataclass(frozen=True, slots=True)
class Option:
    """A word of the line.

    Attributes:
        type: reads its value from text; None for a word without one, which sets `value`.
        metavar: stands for the value in the help.
        name: the keyword in Python; that of the word when "".
        is_list: whether it may be given several times; the values are a list.
    """

    flag: str
    type: Callable[[str], Any] | None
    metavar: str
    help: str
    name: str = ""
    value: Any = True
    is_list: bool = False

    @property
    def field(self) -> str:
        """The keyword in Python."""
        return self.name or self.flag.removeprefix("--").replace("-", "_")


def window(text: str) -> str | tuple[Any, ...]:
    """Read a confidence window, slot:0.5:2 for instance.

    Raises:
        ArgumentTypeError: it is none.
    """
    name, *numbers = text.split(":")
    try:
        if name not in ("off", "auto", "slot") or len(numbers) > (2 if name == "slot" else 0):
            raise ValueError
        read = [kind(number) for kind, number in zip((float, int), numbers, strict=False)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no window; it is {_WINDOWS}") from None
    return (name, *read) if read else name


CELL: Mapping[str, tuple[Option, ...]] = {
    "reply": (
        Option("--system", str, "TEXT", "what the model is told about its task"),
        Option("--thinking", None, "", "reason before answering"),
        Option("--effort", str, "LEVEL", "how long, with --thinking; %dsv4 caps tells the levels"),
        Option("--max-new", int, "N", "at most this many tokens"),
        Option("--stop", str, "TEXT", "end before this text; may be given several times", is_list=True),
        Option("--logprobs", int, "N", "keep log-probabilities, with N alternatives, in _dsv4.logprobs"),
    ),
    "sampling": (
        Option("--temperature", float, "T", "0 is greedy"),
        Option("--top-k", int, "K", "keep the K best; 0 is off"),
        Option("--top-p", float, "P", "keep the shortest prefix with this mass"),
        Option("--min-p", float, "P", "drop what is less likely than P times the best; 0 is off"),
        Option("--seed", int, "N", "the same seed gives the same reply"),
        Option("--sampler", str, "NAME", "gumbel or inverse_cdf, two draws of the same distribution"),
    ),
    "penalties": (
        Option("--repetition-penalty", float, "X", "divide the logits of what was said; 1 is off"),
        Option("--frequency-penalty", float, "X", "subtract this for each time it was said; 0 is off"),
        Option("--presence-penalty", float, "X", "subtract this once it was said; 0 is off"),
        Option("--penalty-last-n", int, "N", "look back on so many tokens; 0 is the whole context"),
        Option("--penalty-scope", str, "SCOPE", "all counts the prompt too, generated does not"),
    ),
    "speculation": (
        Option("--no-spec", None, "", "decode plainly", name="spec", value=False),
        Option("--spec-mode", str, "MODE", "exact keeps the text of plain decoding, rejection its distribution alone"),
        Option("--spec-proposal", str, "KIND", "how exact mode drafts: coupled or greedy"),
        Option("--spec-depth", int, "N", "rows of a verify forward at most"),
        Option("--spec-window", window, "WINDOW", f"which drafts are verified: {_WINDOWS}"),
    ),
}

LOAD: Mapping[str, tuple[Option, ...]] = {
    "model": (
        Option("--max-seq", int, "N", "the longest sequence, prompt and reply together"),
        Option("--devices", str, "NAME", "cpu"),
        Option("--contract", str, "NAME", "roundings of the arithmetic, instead of those it was published with"),
        Option("--encoding", str, "NAME", "preview or v0731, for a checkpoint that does not tell"),
    ),
    "cache": (
        Option("--cache-mib", float, "MIB", "of the snapshots that chats go on from"),
        Option("--host-cache-mib", float, "MIB", "of long prefixes in host memory; 0 keeps none"),
    ),
    "speculation, of requests that do not say": (
        Option("--no-drafter", None, "", "load it without its drafter", name="drafter", value=False),
        Option("--spec-depth", int, "N", "rows of a verify forward at most"),
        Option("--spec-window", window, "WINDOW", f"which drafts are verified: {_WINDOWS}"),
    ),
}
