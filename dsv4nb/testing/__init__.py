"""Stand-ins for tests and pictures of what is built on dsv4nb; names resolve on first use."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_PUBLIC = {
    "FakeEngine": "dsv4nb.testing.fake_engine",
    "Recording": "dsv4nb.testing.recording",
    "ReplayEngine": "dsv4nb.testing.replay_engine",
    "ScriptedDrafter": "dsv4nb.testing.scripted_drafter",
    "drafted_model": "dsv4nb.testing.scripted_drafter",
    "fake_model": "dsv4nb.testing.fake_model",
    "record": "dsv4nb.testing.recorder",
    "replay_model": "dsv4nb.testing.replaying",
    "write_tiny_checkpoint": "dsv4nb.testing.tiny_checkpoint",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dsv4nb.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


class _Names(ModuleType):
    """A package in which a public name is never the module that is called the same, whoever imported that first."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Names
