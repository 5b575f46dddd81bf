"""A tokenizer for tiny checkpoints: the control tokens and the 256 bytes, in the form of the real file."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from dsv4nb.encoding.constants import ASSISTANT, BOS, DSML, EOS, THINK_CLOSE, THINK_OPEN, USER

_CONTROLS = (BOS, EOS, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE, DSML)


def tiny_tokenizer() -> str:
    """Return the text of a tokenizer.json with ids 0 to 262; the first two are those of a tiny config."""
    vocab = {text: i for i, text in enumerate([*_CONTROLS, *sorted(ByteLevel.alphabet())])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in _CONTROLS])
    return str(tokenizer.to_str())


def write_tiny_tokenizer(folder: Path) -> Path:
    """Put it into a folder with a checkpoint; return the folder."""
    (folder / "tokenizer.json").write_text(tiny_tokenizer(), encoding="utf-8")
    return folder
