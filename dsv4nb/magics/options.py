"""The words of the magics: those that stand for keywords of `generate` and `load`, and those of a cell alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WINDOWS = "off, auto, slot, slot:TAU or slot:TAU:FLOOR"

DEFAULT_CHAT = "chat"  # the variable of a bare --chat


@dataclass(frozen=True, slots=True)
class Option:
    """A word of the line.

    Attributes:
        type: reads its value from text; bool for a word with a --no- form, None for one that can only be there.
        metavar: stands for the value in the help.
        name: the keyword in Python; that of the word when "".
        is_list: whether it may be given several times; the values are a list.
        bare: what the word stands for without a value, "" when it must have one.
        choices: values to complete; `type` or the engine refuse others.
        kind: of variable that the value names, to complete it: model, chat, function or variable.
    """

    flag: str
    type: Callable[[str], Any] | None
    metavar: str
    help: str
    name: str = ""
    is_list: bool = False
    bare: str = ""
    choices: tuple[str, ...] = ()
    kind: str = ""

    @property
    def field(self) -> str:
        """The keyword in Python."""
        return self.name or self.flag.removeprefix("--").replace("-", "_")


Table = Mapping[str, Sequence[Option]]


def each(table: Table) -> Iterator[Option]:
    """Yield the words of a table."""
    for options in table.values():
        yield from options


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


def variable(text: str) -> str:
    """Read the name of a variable.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is no variable name")
    return text


def variables(text: str) -> list[str]:
    """Read names of variables with commas between them.

    Raises:
        ArgumentTypeError: one is none.
    """
    return [variable(name.strip()) for name in text.split(",")]


_WINDOW = Option(
    "--spec-window", window, "WINDOW", f"which drafts are verified: {_WINDOWS}", choices=("off", "auto", "slot")
)
_DEPTH = Option("--spec-depth", int, "N", "rows of a verify forward at most")

CELL: Table = {
    "reply": (
        Option("--system", str, "TEXT", "what the model is told about its task"),
        Option("--thinking", bool, "", "reason before answering"),
        Option(
            "--effort",
            str,
            "LEVEL",
            "how long, with --thinking; %dsv4 caps tells the levels",
            choices=("none", "low", "medium", "high", "max"),
        ),
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
        Option(
            "--sampler",
            str,
            "NAME",
            "gumbel or inverse_cdf, two draws of the same distribution",
            choices=("gumbel", "inverse_cdf"),
        ),
    ),
    "penalties": (
        Option("--repetition-penalty", float, "X", "divide the logits of what was said; 1 is off"),
        Option("--frequency-penalty", float, "X", "subtract this for each time it was said; 0 is off"),
        Option("--presence-penalty", float, "X", "subtract this once it was said; 0 is off"),
        Option("--penalty-last-n", int, "N", "look back on so many tokens; 0 is the whole context"),
        Option(
            "--penalty-scope",
            str,
            "SCOPE",
            "all counts the prompt too, generated does not",
            choices=("all", "generated"),
        ),
    ),
    "speculation": (
        Option(
            "--spec", bool, "", "speculate, as without the word where there is a drafter; --no-spec decodes plainly"
        ),
        Option(
            "--spec-mode",
            str,
            "MODE",
            "exact keeps the text of plain decoding, rejection its distribution alone",
            choices=("exact", "rejection"),
        ),
        Option(
            "--spec-proposal",
            str,
            "KIND",
            "how exact mode drafts: coupled or greedy",
            choices=("coupled", "greedy"),
        ),
        _DEPTH,
        _WINDOW,
    ),
}

NOTEBOOK: Table = {
    "this cell": (
        Option(
            "--model", variable, "NAME", "the variable that holds the model; the loaded one if left out", kind="model"
        ),
        Option(
            "--chat",
            variable,
            "NAME",
            f"the cell is the next turn of the chat in this variable, {DEFAULT_CHAT!r} if left out; made when absent",
            bare=DEFAULT_CHAT,
            kind="chat",
        ),
        Option("--as", variable, "NAME", "also keep the result in this variable", name="name"),
        Option("--stream", bool, "", "show the reply while it grows; --no-stream shows it once it is complete"),
    ),
    "prompt": (
        Option(
            "--with",
            variable,
            "VAR",
            "put this variable before the prompt: text as it is, a data frame as CSV, anything else as Python "
            "shows it; may be given several times",
            name="context",
            is_list=True,
            kind="variable",
        ),
        Option("--fill", None, "", "put the values of {expressions} into the cell; {{ and }} are braces then"),
    ),
    "form of the reply": (
        Option("--json", None, "", "a JSON object; _dsv4.value holds it, beside _dsv4.text"),
        Option(
            "--schema",
            variable,
            "VAR",
            "JSON of this form: a schema as a dict, or a dataclass, TypedDict or pydantic model, which _dsv4.value is",
            kind="variable",
        ),
        Option(
            "--tools",
            variables,
            "A,B",
            "functions that the model may call; they are run, and it goes on with their results",
            kind="function",
        ),
    ),
}

LOAD: Table = {
    "model": (
        Option("--max-seq", int, "N", "the longest sequence, prompt and reply together"),
        Option("--devices", str, "NAMES", "cpu, the id of a GPU, or of several, as 0,1", choices=("cpu", "0", "0,1")),
        Option(
            "--placement",
            str,
            "NAME",
            "how several GPUs share the model: every layer, or some layers each",
            choices=("tensor", "pipeline"),
        ),
        Option("--contract", str, "NAME", "roundings of the arithmetic, instead of those it was published with"),
        Option(
            "--encoding",
            str,
            "NAME",
            "preview or v0731, for a checkpoint that does not tell",
            choices=("preview", "v0731"),
        ),
    ),
    "prompts": (
        Option("--prefill", str, "FORM", "exact, as rows are read, or fast, in chunks", choices=("exact", "fast")),
        Option("--prefill-rows", int, "N", "tokens of one fast chunk"),
    ),
    "cache": (
        Option("--cache-mib", float, "MIB", "of the snapshots that chats go on from"),
        Option("--host-cache-mib", float, "MIB", "of long prefixes in host memory; 0 keeps none"),
    ),
    "speculation, of requests that do not say": (
        Option("--drafter", bool, "", "insist on its drafter; --no-drafter loads it without"),
        _DEPTH,
        _WINDOW,
    ),
}
