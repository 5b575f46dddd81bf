"""A tokenizer without a vocabulary of its own: the control tokens and the 256 bytes, in the form of the real file."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from dsv4nb.encoding.constants import ASSISTANT, BOS, DSML, EOS, THINK_CLOSE, THINK_OPEN, USER

_CONTROLS = (BOS, EOS, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE, DSML)


def byte_tokenizer() -> str:
    """Return the text of a tokenizer.json with ids 0 to 262; the first two are begin and end, as configs say."""
    vocab = {text: i for i, text in enumerate([*_CONTROLS, *sorted(ByteLevel.alphabet())])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in _CONTROLS])
    return str(tokenizer.to_str())
