"""config.json as a typed value, strictly parsed (model.md section 1).

Two spellings of the same facts exist: config.json and the official inference/config.json. Both are
parsed; where a folder has both, they must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsv4nb.checkpoint.aliases import check_aliases
from dsv4nb.checkpoint.census import DSPARK_KEYS, has_dspark_keys
from dsv4nb.checkpoint.fields import Fields
from dsv4nb.checkpoint.jsonfile import read_object
from dsv4nb.checkpoint.probe import MODEL_TYPE
from dsv4nb.errors import CheckpointError, DamagedCheckpoint, NotACheckpoint, UnsupportedModel

LayerKind = Literal["swa", "csa", "hca"]  # ratio 0, 4, 128

DSPARK_STAGES = 3  # mtp.0, mtp.1, mtp.2; config.json says 1 (T1)

# the key of SGLang that names the chat encoding; revision.py reads it
PROFILE_KEY = "dsv4_reasoning_effort_profile"

# fields of config.json that change neither shapes nor arithmetic
_IGNORED = {
    "_name_or_path": "a label; the load card may show it",
    "attention_dropout": "training only",
    "auto_map": "points to code for another library; never run",
    "dtype": "newer spelling of torch_dtype",
    "initializer_range": "training only",
    "pad_token_id": "nothing is padded",
    "torch_dtype": "the files say the dtype of each tensor",
    "transformers_version": "a label",
    "use_cache": "another library's switch",
    PROFILE_KEY: "chat encoding, not the network",
}

# fields of quantization_config beside the five that describe FP8: labels of NVFP4 exports
_IGNORED_QUANTIZATION = {
    "exclude_modules": "the files say the format of each tensor",
    "ignore": "the files say the format of each tensor",
    "producer": "a label",
    "quant_algo": "a label; moe_quant_algo is checked",
    "quantized_layers": "the files say the format of each tensor",
}

# inference/config.json spelling of each shared field
_INFERENCE_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_hash_layers": "n_hash_layers",
    "num_nextn_predict_layers": "n_mtp_layers",
    "num_attention_heads": "n_heads",
    "head_dim": "head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "sliding_window": "window_size",
    "compress_ratios": "compress_ratios",
    "drafter_ratios": "compress_ratios",
    "rope_theta": "rope_theta",
    "compress_rope_theta": "compress_rope_theta",
    "rope_factor": "rope_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_max_position_embeddings": "original_seq_len",
    "index_n_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "hc_mult": "hc_mult",
    "hc_sinkhorn_iters": "hc_sinkhorn_iters",
    "hc_eps": "hc_eps",
    "rms_norm_eps": "norm_eps",
    "n_routed_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts",
    "num_experts_per_tok": "n_activated_experts",
    "moe_intermediate_size": "moe_inter_dim",
    "routed_scaling_factor": "route_scale",
    "swiglu_limit": "swiglu_limit",
    "expert_dtype": "expert_dtype",
    "quantized": "dtype",
    "dspark": "dspark_*",
}
_HF_NAMES = {name: name for name in _INFERENCE_NAMES} | {"rope_factor": "factor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig:
    """The four `dspark_*` fields."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything of config.json that changes shapes or arithmetic; HF field names.

    Attributes:
        compress_ratios: one per trunk layer: 0, 4 or 128. The tail for the drafter is `drafter_ratios`.
        rope_factor, beta_fast, beta_slow, original_max_position_embeddings: the YaRN fields of `rope_scaling`.
        expert_dtype: format of the routed experts on disk: "fp4", "fp8" or "bf16".
        quantized: whether projections are FP8 with 128x128 scales (False: plain bf16 checkpoint).
        dspark: None when the four keys are absent.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_hash_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    drafter_ratios: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    max_position_embeddings: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    expert_dtype: str
    quantized: bool
    bos_token_id: int
    eos_token_id: int
    dspark: DSparkConfig | None

    def kind(self, layer: int) -> LayerKind:
        """Attention kind of trunk layer `layer`."""
        return {0: "swa", 4: "csa", 128: "hca"}[self.compress_ratios[layer]]  # type: ignore[return-value]

    def is_hashed(self, layer: int) -> bool:
        """Whether trunk layer `layer` routes by the token-id table."""
        return layer < self.num_hash_layers

    @property
    def wo_a_width(self) -> int:
        """Input columns of one group of the output projection."""
        return self.num_attention_heads * self.head_dim // self.o_groups


def read_config(folder: Path) -> ModelConfig:
    """Read and check config.json, and inference/config.json where there is one.

    Raises:
        NotACheckpoint: no config.json, or of another model.
        UnsupportedModel: a V4.1 model.
        DamagedCheckpoint: a config file is broken JSON.
        CheckpointError: a field is missing, unknown, out of range, or the two files disagree; `param` names it.
    """
    raw = read_raw_config(folder)
    config = from_hf(raw)
    inference = folder / "inference" / "config.json"
    if inference.is_file():
        raw_inference = _read(folder, inference)
        _check_agreement(config, from_inference(raw_inference), raw_inference)
    return config


def read_raw_config(folder: Path) -> dict[str, Any]:
    """Read config.json as it stands; raises NotACheckpoint or DamagedCheckpoint."""
    path = folder / "config.json"
    if not folder.exists():
        raise NotACheckpoint(f"there is no folder {folder}; give the folder that holds config.json", param="path")
    if not folder.is_dir():
        raise NotACheckpoint(f"{folder} is a file; give the folder that holds config.json", param="path")
    if not path.is_file():
        raise NotACheckpoint(
            f"{folder} has no config.json; give the folder that holds config.json and the *.safetensors files",
            param="path",
        )
    return _read(folder, path)


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse the Hugging Face spelling.

    Raises:
        NotACheckpoint, UnsupportedModel: another model.
        CheckpointError: a field is missing, unknown or out of range; `param` names it.
    """
    require_this_model(raw)
    f = Fields(raw, "config.json")
    f.value("model_type")
    if f.has("architectures"):
        f.fixed("architectures", ["DeepseekV4ForCausalLM"])
    f.fixed("num_key_value_heads", 1)
    f.fixed("scoring_func", "sqrtsoftplus")
    f.fixed("topk_method", "noaux_tc")
    f.fixed("norm_topk_prob", True)
    f.fixed("hidden_act", "silu")
    f.fixed("attention_bias", False)
    f.fixed("tie_word_embeddings", False)
    rope = f.inside("rope_scaling")
    rope.fixed("type", "yarn")
    if rope.has("rope_type"):
        rope.fixed("rope_type", "yarn")
    if f.has("quantization_config"):
        _check_quantization(f.inside("quantization_config"))
    config = _build(
        f,
        rope,
        _HF_NAMES,
        n_mtp=f.integer("num_nextn_predict_layers", low=0),
        quantized=f.has("quantization_config"),
        max_position=f.integer("max_position_embeddings"),
        epsilons=(f.number("hc_eps"), f.number("rms_norm_eps")),
        bos_eos=(f.integer("bos_token_id", low=0), f.integer("eos_token_id", low=0)),
    )
    check_aliases(f, config)
    rope.finish({})
    f.finish(_IGNORED)
    return config


def from_inference(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse the official inference/config.json spelling.

    The file does not state hc_eps, norm_eps, the two token ids and the maximum position; they are the
    ones of every release. Everything else must be there.

    Raises:
        CheckpointError: a field is missing, unknown or out of range; `param` names it.
    """
    f = Fields(raw, "inference/config.json")
    f.fixed("score_func", "sqrtsoftplus")
    quantized = f.choice("dtype", ("fp8", "bf16")) == "fp8"
    if quantized:
        f.fixed("scale_fmt", "ue8m0")
    config = _build(
        f,
        f,
        _INFERENCE_NAMES,
        n_mtp=f.integer("n_mtp_layers", low=0) if f.has("n_mtp_layers") else 1,
        quantized=quantized,
        max_position=1048576,
        epsilons=tuple(f.number(name) if f.has(name) else 1e-6 for name in ("hc_eps", "norm_eps")),
        bos_eos=(0, 1),
    )
    f.finish({} if quantized else {"scale_fmt": "there are no scales"})
    return config


def _build(
    f: Fields,
    rope: Fields,
    names: Mapping[str, str],
    *,
    n_mtp: int,
    quantized: bool,
    max_position: int,
    epsilons: tuple[float, ...],
    bos_eos: tuple[int, int],
) -> ModelConfig:
    """Read the fields that both spellings state; `names` maps attributes to keys."""

    def count(name: str) -> int:
        return f.integer(names[name])

    f.fixed(names["n_shared_experts"], 1)
    layers, vocab = count("num_hidden_layers"), count("vocab_size")
    for name, token in zip(("bos_token_id", "eos_token_id"), bos_eos, strict=True):
        f.require(token < vocab, name, f"less than the vocabulary of {vocab}")
    dspark = _dspark(f, layers, vocab)
    trunk, drafter = _ratios(f, layers, n_mtp if dspark is None else DSPARK_STAGES)
    config = ModelConfig(
        vocab_size=vocab,
        hidden_size=count("hidden_size"),
        num_hidden_layers=layers,
        num_hash_layers=f.integer(names["num_hash_layers"], low=0, high=layers),
        num_nextn_predict_layers=n_mtp,
        num_attention_heads=count("num_attention_heads"),
        head_dim=count("head_dim"),
        qk_rope_head_dim=count("qk_rope_head_dim"),
        q_lora_rank=count("q_lora_rank"),
        o_groups=count("o_groups"),
        o_lora_rank=count("o_lora_rank"),
        sliding_window=count("sliding_window"),
        compress_ratios=trunk,
        drafter_ratios=drafter,
        rope_theta=f.number(names["rope_theta"], low=1),
        compress_rope_theta=f.number(names["compress_rope_theta"], low=1),
        rope_factor=rope.number(names["rope_factor"]),
        beta_fast=rope.number(names["beta_fast"]),
        beta_slow=rope.number(names["beta_slow"]),
        original_max_position_embeddings=rope.integer(names["original_max_position_embeddings"]),
        max_position_embeddings=max_position,
        index_n_heads=count("index_n_heads"),
        index_head_dim=count("index_head_dim"),
        index_topk=count("index_topk"),
        hc_mult=count("hc_mult"),
        hc_sinkhorn_iters=count("hc_sinkhorn_iters"),
        hc_eps=epsilons[0],
        rms_norm_eps=epsilons[1],
        n_routed_experts=count("n_routed_experts"),
        n_shared_experts=1,
        num_experts_per_tok=count("num_experts_per_tok"),
        moe_intermediate_size=count("moe_intermediate_size"),
        routed_scaling_factor=f.number(names["routed_scaling_factor"]),
        swiglu_limit=f.number(names["swiglu_limit"]),
        expert_dtype=f.choice(names["expert_dtype"], ("fp4", "fp8", "bf16")),
        quantized=quantized,
        bos_token_id=bos_eos[0],
        eos_token_id=bos_eos[1],
        dspark=dspark,
    )
    _check_shapes(config, f, names)
    return config


def require_this_model(raw: Mapping[str, Any]) -> None:
    """Refuse a config.json of another model; raises NotACheckpoint, or UnsupportedModel for V4.1."""
    found = raw.get("model_type")
    architectures = raw.get("architectures")
    names = [a for a in architectures if isinstance(a, str)] if isinstance(architectures, list) else []
    later = next((n for n in (found, *names) if isinstance(n, str) and _is_v41(n)), None)
    if later is not None:
        raise UnsupportedModel(
            f"this is DeepSeek-V4.1 ({later}); this version runs DeepSeek-V4 only: load a V4-Flash checkpoint",
            param="model_type",
        )
    if found != MODEL_TYPE:
        said = f"config.json says model_type {found!r}" if "model_type" in raw else "config.json lacks model_type"
        raise NotACheckpoint(f"{said}; this version runs {MODEL_TYPE!r} only", param="model_type")


def _is_v41(name: str) -> bool:
    return name.startswith(("deepseek_v41", "DeepseekV41"))


def _read(folder: Path, path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError) as e:
        raise DamagedCheckpoint(str(folder), [f"{path.relative_to(folder)}: {e}"]) from e


def _dspark(f: Fields, layers: int, vocab: int) -> DSparkConfig | None:
    if not has_dspark_keys(f.raw, f.source):
        return None
    taps = f.integers("dspark_target_layer_ids", lambda i: 0 <= i < layers, f"in [0, {layers})")
    f.require(len(taps) > 0 and list(taps) == sorted(set(taps)), "dspark_target_layer_ids", "ascending, not empty")
    return DSparkConfig(
        block_size=f.integer("dspark_block_size"),
        noise_token_id=f.integer("dspark_noise_token_id", low=0, high=vocab - 1),
        target_layer_ids=taps,
        markov_rank=f.integer("dspark_markov_rank"),
    )


def _ratios(f: Fields, layers: int, n_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split `compress_ratios` into the trunk's and the drafter's; a block the list leaves out has ratio 0."""
    ratios = f.integers("compress_ratios", lambda r: r in (0, 4, 128), "0, 4 or 128")
    f.require(len(ratios) >= layers, "compress_ratios", f"at least {layers} entries long, one per layer")
    tail = ratios[layers:]
    f.require(not any(tail), "compress_ratios", f"0 after entry {layers - 1}: drafter blocks have the window only")
    return ratios[:layers], tail + (0,) * (n_blocks - len(tail))


def _check_quantization(q: Fields) -> None:
    q.fixed("quant_method", "fp8")
    q.fixed("fmt", "e4m3")
    q.fixed("scale_fmt", "ue8m0")
    q.fixed("activation_scheme", "dynamic")
    q.fixed("weight_block_size", [128, 128])
    if q.has("moe_quant_algo"):
        q.fixed("moe_quant_algo", "NVFP4")
    if q.has("group_size"):
        q.fixed("group_size", 16)
    q.finish(_IGNORED_QUANTIZATION)


def _check_shapes(c: ModelConfig, f: Fields, names: Mapping[str, str]) -> None:
    """Check what several fields must fulfil together."""

    def require(holds: bool, field: str, limit: str) -> None:
        f.require(holds, names[field], limit)

    rope = c.qk_rope_head_dim
    require(rope % 2 == 0, "qk_rope_head_dim", "even: dimensions are rotated in pairs")
    require(c.head_dim > rope and (c.head_dim - rope) % 64 == 0, "head_dim", f"{rope} + a multiple of 64")
    is_power = c.index_head_dim & (c.index_head_dim - 1) == 0
    require(is_power and c.index_head_dim >= max(32, rope), "index_head_dim", f"a power of two >= {max(32, rope)}")
    require(c.num_attention_heads % c.o_groups == 0, "o_groups", f"a divisor of {c.num_attention_heads} heads")
    require(c.num_experts_per_tok <= c.n_routed_experts, "num_experts_per_tok", f"at most {c.n_routed_experts} experts")
    if c.quantized:
        # inputs of FP8 and FP4 matrices are rounded in blocks of 128
        require(c.hidden_size % 128 == 0, "hidden_size", "a multiple of 128")
        require(c.q_lora_rank % 128 == 0, "q_lora_rank", "a multiple of 128")
        require(c.moe_intermediate_size % 128 == 0, "moe_intermediate_size", "a multiple of 128")
        require(c.o_groups * c.o_lora_rank % 128 == 0, "o_lora_rank", f"such that {c.o_groups} of it divide by 128")
        require(c.expert_dtype != "bf16", "expert_dtype", "fp4 or fp8 where the other matrices are FP8")
    else:
        require(c.expert_dtype == "bf16", "expert_dtype", "bf16 where there is no quantization_config")


def _check_agreement(config: ModelConfig, other: ModelConfig, raw_other: Mapping[str, Any]) -> None:
    """Compare every fact that inference/config.json states with config.json."""
    for name, spelling in _INFERENCE_NAMES.items():
        is_stated = spelling in raw_other or (name == "dspark" and (config.dspark or other.dspark))
        ours, theirs = getattr(config, name), getattr(other, name)
        if not is_stated or ours == theirs:
            continue
        # T1: config.json of the DSpark releases says 1, and 3 blocks exist
        if name == "num_nextn_predict_layers" and config.dspark is not None and theirs == DSPARK_STAGES:
            continue
        # a bf16 copy keeps the file that says what the official converter would write
        if name in ("quantized", "expert_dtype") and not config.quantized:
            continue
        if name == "dspark":
            spelling, ours, theirs = _first_difference(config.dspark, other.dspark)
        raise CheckpointError(
            f"config.json and inference/config.json disagree: {name} is {ours!r}, {spelling} is {theirs!r}. "
            "Fetch both files from the same release.",
            param=name,
        )


def _first_difference(ours: DSparkConfig | None, theirs: DSparkConfig | None) -> tuple[str, object, object]:
    if ours is None or theirs is None:
        return "dspark_*", ours, theirs
    for key in DSPARK_KEYS:
        a, b = (getattr(side, key.removeprefix("dspark_")) for side in (ours, theirs))
        if a != b:
            return key, a, b
    return "dspark_*", ours, theirs
