"""A model that says what a script says, for tests of everything above the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4nb.config import SamplerConfig, SpecConfig
from dsv4nb.info import Capabilities, LoadInfo
from dsv4nb.model import Model, Parts
from dsv4nb.session.limits import room
from dsv4nb.session.request import Limits
from dsv4nb.session.server import Server
from dsv4nb.testing.fake_engine import FakeEngine, FakeTokenizer


def fake_model(
    script: str | Sequence[str | Sequence[int]] = "Hello.",
    *,
    delay_s: float = 0.0,
    name: str = "fake",
    max_seq: int = 4096,
    tokenizer: FakeTokenizer | None = None,
    **engine_options: Any,
) -> Model:
    """Return a model that gives the replies of `script`, one per request and the last one from then on.

    Args:
        script: a reply as text, in which control tokens are control tokens, or as ids.
        delay_s: of each token.
        engine_options: of `FakeEngine`.
    """
    tokens = tokenizer or FakeTokenizer()
    replies = [script] if isinstance(script, str) else script
    scripts = [tokens.encode_trusted(reply) if isinstance(reply, str) else reply for reply in replies]
    engine = FakeEngine(
        *scripts,
        eos=tokens.eos_id,
        vocab_size=tokens.vocab_size,
        max_seq=max_seq,
        delay_s=delay_s,
        **engine_options,
    )
    limits = Limits(
        max_seq=max_seq,
        vocab_size=tokens.vocab_size,
        revision="v0731",
        sampler=SamplerConfig(),
        spec=SpecConfig() if engine.block_size else None,
        block_size=engine.block_size,
        model=name,
        weights="a script",
        arithmetic="none",
    )
    server = Server(engine, tokens, name)
    info = _info(name, max_seq, tokens.vocab_size)
    caps = Capabilities(
        efforts=("low", "high", "max"),
        context_length=max_seq,
        max_prompt=room(max_seq),
        n_vocab=tokens.vocab_size,
        recommended={},
    )
    parts = Parts(engine=engine, tokens=tokens, server=server, limits=limits, info=info, caps=caps)
    return Model(parts, server.close)


def _info(name: str, max_seq: int, vocabulary: int) -> LoadInfo:
    return LoadInfo(
        name=name,
        path="",
        provenance="a script",
        layers="0",
        hidden=0,
        heads=0,
        experts="none",
        window=0,
        vocabulary=vocabulary,
        weights="no weights",
        bits_per_weight=0.0,
        n_weights=0,
        disk_bytes=0,
        encoding="v0731 (by definition)",
        contract="none",
        defaults="temperature 1, top_p 1 (by definition)",
        drafter="absent",
        max_seq=max_seq,
        max_seq_declared=max_seq,
        device="CPU",
        threads=1,
        load_s=0.0,
    )
