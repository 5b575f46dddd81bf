"""Which tensors a config must have, and what differs (model.md 2.2, 2.4)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from dsv4nb.checkpoint.config import DSPARK_STAGES, ModelConfig
from dsv4nb.checkpoint.headers import ITEM_BYTES, TensorEntry
from dsv4nb.errors import CheckpointError

Drafter = Literal["none", "nextn", "dspark"]
ExpertFormat = Literal["fp4", "fp8", "nvfp4", "bf16"]

FP8_BLOCK = 128  # rows and columns under one scale
FP4_BLOCK = 32  # columns under one scale
NVFP4_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Spec:
    """What one tensor must be.

    Attributes:
        dtype: safetensors spelling.
        required: False for what an export may leave out because nothing reads it.
    """

    dtype: str
    shape: tuple[int, ...]
    required: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def expected_tensors(config: ModelConfig, drafter: Drafter, expert_format: ExpertFormat) -> dict[str, Spec]:
    """List every tensor of a checkpoint by its official name.

    Args:
        drafter: which `mtp.*` blocks there are; "dspark" needs `config.dspark`.
        expert_format: of the trunk's routed experts. The drafter's are the same, except that an
            NVFP4 export leaves them in FP4.
    """
    return dict(_tensors(config, drafter, expert_format))


def drafter_of(config: ModelConfig, names: Iterable[str]) -> Drafter:
    """Tell from the tensor names which drafter there is.

    Raises:
        CheckpointError: the names contradict the `dspark_*` keys of the config.
    """
    present = {n for n in names if n.startswith("mtp.")}
    has_keys = config.dspark is not None
    if not present:
        if has_keys:
            raise CheckpointError(
                "config.json has the four dspark_* keys, but there is no mtp.* tensor. Fetch the shards with mtp.*, "
                "or remove the four keys (and the entries after the last layer in compress_ratios) to load the trunk.",
                param="dspark_block_size",
            )
        return "none"
    is_nextn, is_dspark = "mtp.0.e_proj.weight" in present, "mtp.0.main_proj.weight" in present
    if (is_nextn and has_keys) or (is_dspark and not has_keys) or (is_nextn and is_dspark):
        held = " and ".join(n for n, there in (("e_proj", is_nextn), ("main_proj", is_dspark)) if there)
        keys = "has the four dspark_* keys" if has_keys else "has no dspark_* keys"
        raise CheckpointError(
            f"the weights hold mtp.0.{held}, but config.json {keys}: config and weights are of different releases. "
            "Fetch both from the same one.",
            param="dspark_block_size",
        )
    return "dspark" if has_keys else "nextn"


def expert_format_of(config: ModelConfig, names: Iterable[str]) -> ExpertFormat:
    """Tell the format of the trunk's routed experts; only NVFP4 is invisible in the config."""
    if config.expert_dtype == "fp4":
        return "nvfp4" if any(n.endswith(".weight_scale_2") for n in names) else "fp4"
    return "fp8" if config.expert_dtype == "fp8" else "bf16"


def differences(
    expected: Mapping[str, Spec], entries: Mapping[str, TensorEntry], known: frozenset[str] = frozenset()
) -> list[str]:
    """Describe every missing, extra, misshapen or wrongly typed tensor, one line each.

    The same fault of several experts is one line that lists them.

    Args:
        known: tensors that a fault already reported stands for; they are not reported as missing.
    """
    faults: list[tuple[str, str]] = []
    for name, spec in expected.items():
        entry = entries.get(name)
        if entry is None:
            if spec.required and name not in known:
                faults.append((name, f"missing, expected {spec.dtype} {list(spec.shape)}"))
        elif entry.dtype != spec.dtype or not _same_shape(entry.shape, spec.shape):
            want, got = f"{spec.dtype} {list(spec.shape)}", f"{entry.dtype} {list(entry.shape)}"
            faults.append((name, f"expected {want}, found {got} in {entry.file.name}"))
    for name, entry in entries.items():
        if name not in expected:
            faults.append((name, f"not of this model, found {entry.dtype} {list(entry.shape)} in {entry.file.name}"))
    return _fold_experts(faults)


def _same_shape(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    # exporters write a scalar as [] or as [1]
    return found == wanted or (wanted == () and found == (1,))


_EXPERT = re.compile(r"(?<=\.ffn\.experts\.)\d+(?=\.)")


def _fold_experts(faults: Iterable[tuple[str, str]]) -> list[str]:
    groups: dict[tuple[str, str], list[int]] = {}
    for name, fault in faults:
        match = _EXPERT.search(name)
        numbers = groups.setdefault((_EXPERT.sub("*", name), fault), [])
        if match:
            numbers.append(int(match[0]))
    return [f"{name.replace('*', _ranges(numbers))}: {fault}" for (name, fault), numbers in groups.items()]


def _ranges(numbers: list[int]) -> str:
    """Write sorted numbers as "7" or "{0-3,9}"."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "}"


Named = Iterator[tuple[str, Spec]]


def _tensors(c: ModelConfig, drafter: Drafter, expert_format: ExpertFormat) -> Named:
    yield "embed.weight", Spec("BF16", (c.vocab_size, c.hidden_size))
    yield "head.weight", Spec("BF16", (c.vocab_size, c.hidden_size))
    yield "norm.weight", Spec("BF16", (c.hidden_size,))
    yield from _stream_head(c, "")
    for layer, ratio in enumerate(c.compress_ratios):
        yield from _block(c, f"layers.{layer}.", expert_format, is_hashed=c.is_hashed(layer))
        if ratio:
            yield from _compressor(c, f"layers.{layer}.attn.compressor.", ratio, c.head_dim)
        if ratio == 4:
            yield from _indexer(c, f"layers.{layer}.attn.indexer.")
    draft_format: ExpertFormat = "fp4" if expert_format == "nvfp4" else expert_format
    if drafter == "nextn":
        yield from _block(c, "mtp.0.", draft_format, is_hashed=False)
        yield from _nextn(c)
    elif drafter == "dspark":
        for stage in range(DSPARK_STAGES):
            yield from _block(c, f"mtp.{stage}.", draft_format, is_hashed=False)
        yield from _dspark(c)


def _linear(c: ModelConfig, name: str, rows: int, columns: int) -> Named:
    """A projection: FP8 with 128x128 scales, or BF16 in a plain checkpoint."""
    if not c.quantized:
        yield f"{name}.weight", Spec("BF16", (rows, columns))
        return
    yield f"{name}.weight", Spec("F8_E4M3", (rows, columns))
    yield f"{name}.scale", Spec("F8_E8M0", (_blocks(rows), _blocks(columns)))


def _blocks(n: int) -> int:
    return -(-n // FP8_BLOCK)


def _block(c: ModelConfig, p: str, expert_format: ExpertFormat, *, is_hashed: bool) -> Named:
    """What every block has: window attention, experts, hyper-connections."""
    width = c.hidden_size
    for name, size in (("attn_norm", width), ("ffn_norm", width), ("attn.q_norm", c.q_lora_rank)):
        yield f"{p}{name}.weight", Spec("BF16", (size,))
    yield f"{p}attn.kv_norm.weight", Spec("BF16", (c.head_dim,))
    yield f"{p}attn.attn_sink", Spec("F32", (c.num_attention_heads,))
    grouped = c.o_groups * c.o_lora_rank
    yield from _linear(c, f"{p}attn.wq_a", c.q_lora_rank, width)
    yield from _linear(c, f"{p}attn.wq_b", c.num_attention_heads * c.head_dim, c.q_lora_rank)
    yield from _linear(c, f"{p}attn.wkv", c.head_dim, width)
    yield from _linear(c, f"{p}attn.wo_a", grouped, c.wo_a_width)
    yield from _linear(c, f"{p}attn.wo_b", width, grouped)
    mixes = (2 + c.hc_mult) * c.hc_mult
    for sublayer in ("attn", "ffn"):
        yield f"{p}hc_{sublayer}_fn", Spec("F32", (mixes, c.hc_mult * width))
        yield f"{p}hc_{sublayer}_base", Spec("F32", (mixes,))
        yield f"{p}hc_{sublayer}_scale", Spec("F32", (3,))
    yield f"{p}ffn.gate.weight", Spec("BF16", (c.n_routed_experts, width))
    if is_hashed:
        yield f"{p}ffn.gate.tid2eid", Spec("I64", (c.vocab_size, c.num_experts_per_tok))
    else:
        yield f"{p}ffn.gate.bias", Spec("F32", (c.n_routed_experts,))
    inner = c.moe_intermediate_size
    for w, rows, columns in (("w1", inner, width), ("w2", width, inner), ("w3", inner, width)):
        yield from _linear(c, f"{p}ffn.shared_experts.{w}", rows, columns)
        for e in range(c.n_routed_experts):
            yield from _expert(f"{p}ffn.experts.{e}.{w}", expert_format, rows, columns)


def _expert(name: str, expert_format: ExpertFormat, rows: int, columns: int) -> Named:
    match expert_format:
        case "fp4":
            yield f"{name}.weight", Spec("I8", (rows, columns // 2))
            yield f"{name}.scale", Spec("F8_E8M0", (rows, columns // FP4_BLOCK))
        case "fp8":
            yield f"{name}.weight", Spec("F8_E4M3", (rows, columns))
            yield f"{name}.scale", Spec("F32", (_blocks(rows), _blocks(columns)))
        case "nvfp4":
            yield f"{name}.weight", Spec("U8", (rows, columns // 2))
            yield f"{name}.weight_scale", Spec("F8_E4M3", (rows, columns // NVFP4_BLOCK))
            yield f"{name}.weight_scale_2", Spec("F32", ())
            # a static activation scale: inputs are quantised as they come
            yield f"{name}.input_scale", Spec("F32", (), required=False)
        case "bf16":
            yield f"{name}.weight", Spec("BF16", (rows, columns))


def _compressor(c: ModelConfig, p: str, ratio: int, dim: int) -> Named:
    rows = dim * (2 if ratio == 4 else 1)  # windows overlap at ratio 4: an early and a late half
    yield f"{p}wkv.weight", Spec("BF16", (rows, c.hidden_size))
    yield f"{p}wgate.weight", Spec("BF16", (rows, c.hidden_size))
    yield f"{p}ape", Spec("F32", (ratio, rows))
    yield f"{p}norm.weight", Spec("BF16", (dim,))


def _indexer(c: ModelConfig, p: str) -> Named:
    yield from _linear(c, f"{p}wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
    yield f"{p}weights_proj.weight", Spec("BF16", (c.index_n_heads, c.hidden_size))
    yield from _compressor(c, f"{p}compressor.", 4, c.index_head_dim)


def _stream_head(c: ModelConfig, p: str) -> Named:
    yield f"{p}hc_head_fn", Spec("F32", (c.hc_mult, c.hc_mult * c.hidden_size))
    yield f"{p}hc_head_base", Spec("F32", (c.hc_mult,))
    yield f"{p}hc_head_scale", Spec("F32", (1,))


def _nextn(c: ModelConfig) -> Named:
    for name in ("e_proj", "h_proj"):
        yield from _linear(c, f"mtp.0.{name}", c.hidden_size, c.hidden_size)
    for name in ("enorm", "hnorm", "norm"):
        yield f"mtp.0.{name}.weight", Spec("BF16", (c.hidden_size,))
    yield from _stream_head(c, "mtp.0.")


def _dspark(c: ModelConfig) -> Named:
    assert c.dspark is not None, "a DSpark drafter needs the four keys"
    width, rank = c.hidden_size, c.dspark.markov_rank
    last = f"mtp.{DSPARK_STAGES - 1}."
    yield from _linear(c, "mtp.0.main_proj", width, len(c.dspark.target_layer_ids) * width)
    yield "mtp.0.main_norm.weight", Spec("BF16", (width,))
    yield f"{last}norm.weight", Spec("BF16", (width,))
    yield from _stream_head(c, last)
    yield f"{last}markov_head.markov_w1.weight", Spec("BF16", (c.vocab_size, rank))
    yield f"{last}markov_head.markov_w2.weight", Spec("BF16", (c.vocab_size, rank))
    yield f"{last}confidence_head.proj.weight", Spec("BF16", (1, width + rank))
