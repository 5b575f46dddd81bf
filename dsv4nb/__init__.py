"""dsv4nb: DeepSeek-V4-Flash as an object in a notebook kernel.

Public names resolve on first use, so importing the package loads neither torch nor ipywidgets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"

_PUBLIC = {
    "AcceptancePanel": "dsv4nb.widgets.acceptance",
    "ArchiveError": "dsv4nb.session.archive",
    "CachePanel": "dsv4nb.widgets.cache",
    "CheckpointError": "dsv4nb.errors",
    "Dsv4Error": "dsv4nb.errors",
    "Generation": "dsv4nb.events",
    "LoadPanel": "dsv4nb.widgets.loading",
    "Policy": "dsv4nb.session.reuse",
    "QueuePanel": "dsv4nb.widgets.queueing",
    "Recipe": "dsv4nb.events",
    "RequestError": "dsv4nb.errors",
    "Rounds": "dsv4nb.rounds",
    "SamplerConfig": "dsv4nb.config",
    "SamplerPanel": "dsv4nb.widgets.sampler",
    "SpecConfig": "dsv4nb.config",
    "TokenLens": "dsv4nb.widgets.lens",
    "from_cells": "dsv4nb.session.export",
    "from_jsonl": "dsv4nb.session.export",
    "is_dsv4_dir": "dsv4nb.checkpoint.probe",
    "load": "dsv4nb.model",
    "open_chat": "dsv4nb.model",
    "open_checkpoint": "dsv4nb.checkpoint.opening",
    "schema_of": "dsv4nb.session.functions",
}
__all__ = sorted(name for name, module in _PUBLIC.items() if not module.startswith("dsv4nb.widgets."))


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dsv4nb' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


def load_ipython_extension(ip: InteractiveShell) -> None:
    """Register the magics: `%load_ext dsv4nb`."""
    importlib.import_module("dsv4nb.magics").load_ipython_extension(ip)


def unload_ipython_extension(ip: InteractiveShell) -> None:
    """Remove the magics; loaded models stay as they are."""
    importlib.import_module("dsv4nb.magics").unload_ipython_extension(ip)
