"""Is this folder a dsv4 checkpoint: one small read, no exception. The loader checks everything again."""

from __future__ import annotations

import os
from pathlib import Path

from dsv4nb.checkpoint.jsonfile import read_object

MODEL_TYPE = "deepseek_v4"


def is_dsv4_dir(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a folder whose config.json names this architecture; False when anything cannot be read."""
    try:
        return read_object(Path(path).expanduser() / "config.json").get("model_type") == MODEL_TYPE
    # RuntimeError: a home directory that does not exist; TypeError: not a path at all
    except (OSError, ValueError, TypeError, RuntimeError):
        return False
