"""Stand-ins for tests and pictures of what is built on dsv4nb; names resolve on first use."""

from __future__ import annotations

import importlib

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
    # kept, or the module that the import leaves under the same name would be found from now on
    value = globals()[name] = getattr(importlib.import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
