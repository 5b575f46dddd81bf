"""A tokenizer for tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

from dsv4nb.checkpoint.opening import TOKENIZER
from dsv4nb.encoding.byte_tokenizer import byte_tokenizer


def write_tiny_tokenizer(folder: Path) -> Path:
    """Put the tokenizer of the 256 bytes into a folder with a checkpoint; return the folder."""
    (folder / TOKENIZER).write_text(byte_tokenizer(), encoding="utf-8")
    return folder
