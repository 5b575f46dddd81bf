"""The only reader of the environment. Each DSV4NB_* variable has a keyword of `load` as its twin, and the keyword wins.

DSV4NB_DEVICES    devices: cpu, or GPU ids such as 0,1
DSV4NB_MAX_SEQ    max_seq: longest sequence, prompt and reply together
DSV4NB_SPEC_DEPTH spec_depth: rows of a verify forward at most; models without a drafter do not look at it
DSV4NB_SKIP_WARMUP
                  warmup: 1 is warmup=False, a model on GPUs is handed over before it ran once
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from dsv4nb.errors import RequestError

DEVICES = "DSV4NB_DEVICES"
MAX_SEQ = "DSV4NB_MAX_SEQ"
SPEC_DEPTH = "DSV4NB_SPEC_DEPTH"
SKIP_WARMUP = "DSV4NB_SKIP_WARMUP"

CPU = "cpu"


def devices() -> str | tuple[int, ...] | None:
    """Return the devices that the environment asks for, None when it does not.

    Raises:
        RequestError: the variable cannot be read.
    """
    text = os.environ.get(DEVICES)
    return None if text is None else parse_devices(text, DEVICES)


def host() -> Literal["colab", "vscode", "jupyter", ""]:
    """Return what kind of notebook started this process, "" when nothing tells."""
    if "COLAB_RELEASE_TAG" in os.environ:
        return "colab"
    if any(name.startswith("VSCODE_") for name in os.environ):
        return "vscode"
    return "jupyter" if "JPY_SESSION_NAME" in os.environ or "JPY_PARENT_PID" in os.environ else ""


def max_seq() -> int | None:
    """Return the longest sequence that the environment asks for, None when it does not.

    Raises:
        RequestError: the variable is no positive integer.
    """
    return _positive(MAX_SEQ)


def spec_depth() -> int | None:
    """Return the rows of a verify forward that the environment allows, None when it does not say.

    Raises:
        RequestError: the variable is no positive integer.
    """
    return _positive(SPEC_DEPTH)


def skips_warmup() -> bool:
    """Whether the environment asks for models that did not run yet.

    Raises:
        RequestError: the variable is neither 0 nor 1.
    """
    text = os.environ.get(SKIP_WARMUP, "0")
    if text.strip() not in ("0", "1"):
        raise RequestError(f"{SKIP_WARMUP} is {text!r}; it must be 1, or 0 as when it is not there", param=SKIP_WARMUP)
    return text.strip() == "1"


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set a variable that another library reads, for what is inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _positive(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    number = int(text) if _is_number(text.strip()) else 0
    if number < 1:
        raise RequestError(f"{name} is {text!r}; it must be a positive integer", param=name)
    return number


def parse_devices(given: str | int | Sequence[str | int], param: str) -> str | tuple[int, ...]:
    """Return "cpu", or GPU ids in the given order.

    Args:
        given: "cpu", or ids as "0,1" or as a sequence; blanks around an id are nothing.

    Raises:
        RequestError: an id is missing, is none, or is there twice; `param` is named with the whole value.
    """
    parts = given.split(",") if isinstance(given, str) else [given] if isinstance(given, int) else list(given)
    names = [part.strip() if isinstance(part, str) else part for part in parts]
    if names == [CPU]:
        return CPU
    ids = [int(name) for name in names if not isinstance(name, bool) and _is_number(str(name))]
    if not names or len(ids) != len(names):
        raise RequestError(f"{param} is {given!r}; it must be 'cpu', or GPU ids such as 0,1", param=param)
    if len(set(ids)) != len(ids):
        raise RequestError(f"{param} is {given!r}; each GPU can be named once", param=param)
    return tuple(ids)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()
