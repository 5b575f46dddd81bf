"""The facts of a loaded model, as text and as HTML that needs no kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.config import SpecConfig
from dsv4nb.rounds import Costs
from dsv4nb.tables import as_html, as_text

_KINDS = {"swa": "window only", "csa": "compressed 4:1", "hca": "compressed 128:1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadInfo:
    """What was loaded, from where, and what was concluded from it.

    Attributes:
        layers, experts: their number and kinds, in words.
        encoding: revision of the chat encoding, and what told.
        contract: roundings of the arithmetic, and why these.
        defaults: sampler values of a request that names none, and whose they are.
        drafter: whether there is one, and whether it runs.
        prefill: how prompts are read.
        link: how fast the GPUs reach each other, "" where there is nothing to reach.
        disk_bytes: size of the weight files.
        threads: of one operation.
        load_s: from the call of `load` to the handle; of a shared engine, what loading it took.
    """

    name: str
    path: str
    provenance: str
    layers: str
    hidden: int
    heads: int
    experts: str
    window: int
    vocabulary: int
    weights: str
    bits_per_weight: float
    n_weights: int
    disk_bytes: int
    encoding: str
    contract: str
    defaults: str
    drafter: str
    max_seq: int
    max_seq_declared: int
    device: str
    threads: int
    load_s: float
    prefill: str = "exact"
    link: str = ""

    def rows(self) -> list[tuple[str, str]]:
        """Return the facts as (label, text)."""
        return [
            ("model", self.name),
            ("from", self.provenance),
            ("layers", self.layers),
            ("hidden", f"{self.hidden:,}"),
            ("heads", str(self.heads)),
            ("experts", self.experts),
            ("window", f"{self.window} tokens"),
            ("vocabulary", f"{self.vocabulary:,}"),
            ("weights", f"{count(self.n_weights)}, {self.weights}, {self.bits_per_weight:.2f} bits each"),
            ("on disk", size(self.disk_bytes)),
            ("encoding", self.encoding),
            ("contract", self.contract),
            ("defaults", self.defaults),
            ("drafter", self.drafter),
            ("prompts", self.prefill),
            ("max_seq", f"{self.max_seq:,} of {self.max_seq_declared:,} declared"),
            ("device", f"{self.device}, {self.threads} thread{'s' * (self.threads != 1)}"),
            *([("peer link", self.link)] if self.link else []),
            ("loaded in", f"{self.load_s:.2f} s"),
        ]

    def __str__(self) -> str:
        return as_text(self.rows())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self.rows())


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What requests to a model may ask for: read off its chat encoding, which ships as code, not as a template.

    Attributes:
        efforts: levels of thinking that the encoding knows.
        context_length: tokens of prompt, reply and reserved positions together; `max_prompt` of the longest prompt.
        n_vocab: ids of the tokenizer.
        recommended: sampler values that the checkpoint names; what it does not name is not in it.
        chat, tools, thinking: every encoding of this model has them.
    """

    efforts: tuple[str, ...]
    context_length: int
    max_prompt: int
    n_vocab: int
    recommended: Mapping[str, float]
    chat: bool = True
    tools: bool = True
    thinking: bool = True
    instruct_type: str = "deepseek"
    tokenizer: str = "byte-level BPE"

    @property
    def temperature(self) -> float | None:
        """What the checkpoint recommends, None when it says nothing."""
        return self.recommended.get("temperature")

    @property
    def top_p(self) -> float | None:
        """What the checkpoint recommends, None when it says nothing."""
        return self.recommended.get("top_p")

    def rows(self) -> list[tuple[str, str]]:
        """Return the capabilities as (label, text)."""
        named = ", ".join(f"{name} {value:g}" for name, value in self.recommended.items())
        return [
            ("chat", _yes(self.chat)),
            ("tools", _yes(self.tools)),
            ("thinking", f"{_yes(self.thinking)}, efforts {', '.join(self.efforts)}"),
            ("context", f"{self.context_length:,} tokens, prompts up to {self.max_prompt:,}"),
            ("tokenizer", f"{self.tokenizer}, {self.n_vocab:,} ids, instruct type {self.instruct_type}"),
            ("recommended", named or "nothing"),
        ]

    def __str__(self) -> str:
        return as_text(self.rows())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self.rows())


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecInfo:
    """How a model speculates.

    Attributes:
        config: of requests that do not say; None without a drafter.
        note: why there is no drafter, or why it was given up; "" while it works.
        block_size: drafts of a round at most.
        draft_ms, verify_ms: what a block of drafts takes, and a forward of 1, 2, … rows; None and () until measured.
        plain_ms: what a token takes on the plain route, smoothed; None until one was seen.
    """

    config: SpecConfig | None
    note: str
    block_size: int
    draft_ms: float | None
    verify_ms: tuple[float, ...]
    plain_ms: float | None

    @property
    def costs(self) -> Costs | None:
        """What `Rounds.sweep` and `Rounds.counterfactual` take; None until it was measured."""
        return None if self.draft_ms is None else Costs(draft=self.draft_ms, verify=self.verify_ms)

    def rows(self) -> list[tuple[str, str]]:
        """Return the facts as (label, text)."""
        if self.config is None:
            return [("drafter", f"none: {self.note}")]
        config = self.config
        window = config.window if config.tau is None else f"{config.window} {config.tau:g}"
        depth = self.block_size + 1 if config.depth is None else config.depth
        told = [
            ("drafter", f"given up: {self.note}" if self.note else f"DSpark, {self.block_size} drafts a round"),
            ("mode", f"{config.mode}, {config.proposal} drafts" if config.mode == "exact" else config.mode),
            ("window", f"{window}, at most {depth} rows"),
        ]
        if self.draft_ms is not None:
            told.append(("draft", f"{self.draft_ms:.2f} ms"))
            told.append(("verify", f"{', '.join(f'{ms:.2f}' for ms in self.verify_ms)} ms with 1, 2, … rows"))
        if self.plain_ms is not None:
            told.append(("plain", f"{self.plain_ms:.2f} ms a token"))
        return told

    def __str__(self) -> str:
        return as_text(self.rows())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self.rows())


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def load_info(
    checkpoint: Checkpoint,
    *,
    name: str,
    encoding: str,
    contract: str,
    defaults: str,
    drafter: str,
    max_seq: int,
    device: str,
    threads: int,
    load_s: float,
    prefill: str,
    link: str,
) -> LoadInfo:
    """Return the facts of `checkpoint` as it was loaded."""
    config = checkpoint.config
    return LoadInfo(
        name=name,
        path=str(checkpoint.path),
        provenance=checkpoint.provenance,
        layers=_layers(config),
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        experts=f"{config.n_routed_experts} + {config.n_shared_experts} shared, {config.num_experts_per_tok} per token",
        window=config.sliding_window,
        vocabulary=config.vocab_size,
        weights=checkpoint.quant_label,
        bits_per_weight=checkpoint.bits_per_weight,
        n_weights=checkpoint.n_weights,
        disk_bytes=checkpoint.file_bytes,
        encoding=encoding,
        contract=contract,
        defaults=defaults,
        drafter=drafter,
        max_seq=max_seq,
        max_seq_declared=config.max_position_embeddings,
        device=device,
        threads=threads,
        load_s=load_s,
        prefill=prefill,
        link=link,
    )


def _layers(config: ModelConfig) -> str:
    kinds = sorted((config.kind(i) for i in range(config.num_hidden_layers)), key=list(_KINDS).index)
    told: Sequence[str] = [f"{len(list(same))} {_KINDS[kind]}" for kind, same in groupby(kinds)]
    return f"{config.num_hidden_layers}: {', '.join(told)}"


def count(n: int) -> str:
    """Return a number as people say it: 284.3 B, 9.1 M."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= unit:
            return f"{n / unit:.1f} {letter}"
    return str(n)


def size(n_bytes: int) -> str:
    """Return bytes in the largest unit that leaves at least one."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:.1f} {name}"
    return f"{n_bytes} B"
