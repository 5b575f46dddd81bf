"""The bundled model's tokenizer: a small byte-level BPE that carries the official control tokens."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dsv4nb.encoding.constants import BOS, EOS
from dsv4nb.toy.shape import VOCAB_SIZE

PAD = "<｜▁pad▁｜>"
NOISE = "<｜place▁holder▁no▁799｜>"  # input of the undecided slots of a DSpark draft

# at the top of the vocabulary, in the order of the official ids; only the placeholder is "special" there too
_ADDED = (
    NOISE, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>", "<｜action｜>",
    "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜extracted_url｜>", "<｜read_url｜>",
)  # fmt: skip


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from `texts` and add the control tokens: exactly VOCAB_SIZE ids.

    Digits stay single, so that a column of a sum is a token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_ADDED),
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=t == NOISE) for t in _ADDED])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the texts give {tokenizer.get_vocab_size()} tokens; {VOCAB_SIZE} are needed")
    return tokenizer
