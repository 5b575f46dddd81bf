"""A model that says what a script says, for tests of everything above the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4nb.config import SamplerConfig, SpecConfig
from dsv4nb.engine.protocol import Engine
from dsv4nb.handle import Model, Parts
from dsv4nb.info import Capabilities, LoadInfo
from dsv4nb.session.limits import room
from dsv4nb.session.request import ChatTokens, Limits
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
    return model_of(Server(engine, tokens, name), engine, tokens, limits, provenance="a script")


def model_of(server: Server, engine: Engine, tokens: ChatTokens, limits: Limits, *, provenance: str) -> Model:
    """Return a handle on an engine that is none of a checkpoint's."""
    caps = Capabilities(
        efforts=("low", "high", "max"),
        context_length=limits.max_seq,
        max_prompt=room(limits.max_seq),
        n_vocab=tokens.vocab_size,
        recommended={},
    )
    info = _info(limits, provenance)
    return Model(Parts(engine=engine, tokens=tokens, server=server, limits=limits, info=info, caps=caps), server.close)


def _info(limits: Limits, provenance: str) -> LoadInfo:
    return LoadInfo(
        name=limits.model,
        path="",
        provenance=provenance,
        layers="0",
        hidden=0,
        heads=0,
        experts="none",
        window=0,
        vocabulary=limits.vocab_size,
        weights="no weights",
        bits_per_weight=0.0,
        n_weights=0,
        disk_bytes=0,
        encoding=f"{limits.revision} (by definition)",
        contract=limits.arithmetic,
        defaults="temperature 1, top_p 1 (by definition)",
        drafter="absent",
        max_seq=limits.max_seq,
        max_seq_declared=limits.max_seq,
        device="CPU",
        threads=1,
        load_s=0.0,
    )
