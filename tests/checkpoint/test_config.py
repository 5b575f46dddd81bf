from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from dsv4nb.checkpoint.census import DSPARK_KEYS
from dsv4nb.checkpoint.config import from_hf, from_inference, read_config
from dsv4nb.checkpoint.inventory import Drafter
from dsv4nb.checkpoint.synthetic import inference_config
from dsv4nb.errors import CheckpointError, DamagedCheckpoint, NotACheckpoint, UnsupportedModel
from dsv4nb.testing.tiny_checkpoint import tiny_hf_config

# what may be absent: labels, and the two groups that are all or nothing
OPTIONAL = {
    "architectures",
    "attention_dropout",
    "initializer_range",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
REQUIRED = sorted(tiny_hf_config().keys() - OPTIONAL - {"quantization_config"})
INFERENCE_REQUIRED = sorted(inference_config(tiny_hf_config()).keys() - {"n_mtp_layers"})


def write(folder: Path, raw: dict[str, Any], inference: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    if inference is not None:
        (folder / "inference").mkdir()
        (folder / "inference" / "config.json").write_text(json.dumps(inference))
    return folder


def test_reads_the_released_flash(releases: dict[str, dict[str, Any]]) -> None:
    c = from_hf(releases["0731"])
    assert (c.vocab_size, c.hidden_size, c.num_hidden_layers, c.n_routed_experts) == (129280, 4096, 43, 256)
    assert len(c.compress_ratios) == 43
    assert c.drafter_ratios == (0, 0, 0)
    kinds = [c.kind(i) for i in range(43)]
    assert kinds[:5] == ["swa", "swa", "csa", "hca", "csa"]
    assert (kinds.count("swa"), kinds.count("csa"), kinds.count("hca")) == (2, 21, 20)
    assert kinds[42] == "csa"
    assert [c.is_hashed(i) for i in range(4)] == [True, True, True, False]
    assert c.compress_rope_theta == 160000
    assert c.rope_factor == 16
    assert c.dspark is not None
    assert c.dspark.target_layer_ids == (40, 41, 42)
    assert c.quantized
    assert c.expert_dtype == "fp4"


def test_pro_has_no_window_only_layer(releases: dict[str, dict[str, Any]]) -> None:
    c = from_hf(releases["pro-0813"])
    assert {c.kind(i) for i in range(61)} == {"csa", "hca"}
    assert c.kind(0) == c.kind(1) == "hca"
    assert c.routed_scaling_factor == 2.5


@pytest.mark.parametrize("name", REQUIRED)
def test_m02_each_missing_field_is_named(name: str) -> None:
    raw = tiny_hf_config()
    del raw[name]
    with pytest.raises(CheckpointError, match=rf"lacks {name}\b|{name}") as caught:
        from_hf(raw)
    assert caught.value.param == name


@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_labels_may_be_absent(name: str) -> None:
    raw = tiny_hf_config()
    del raw[name]
    assert from_hf(raw) == from_hf(tiny_hf_config())


@pytest.mark.parametrize("group", ["rope_scaling", "quantization_config"])
def test_each_missing_field_of_a_group_is_named(group: str) -> None:
    for name in tiny_hf_config()[group]:
        raw = tiny_hf_config()
        raw[group] = {k: v for k, v in raw[group].items() if k != name}
        with pytest.raises(CheckpointError, match=rf"config.json lacks {group}\.{name}") as caught:
            from_hf(raw)
        assert caught.value.param == f"{group}.{name}"


@pytest.mark.parametrize("name", INFERENCE_REQUIRED)
def test_each_missing_field_of_the_inference_spelling_is_named(name: str) -> None:
    raw = inference_config(tiny_hf_config())
    del raw[name]
    with pytest.raises(CheckpointError, match=rf"inference/config.json lacks {name}\b") as caught:
        from_inference(raw)
    assert caught.value.param == name


@pytest.mark.parametrize("drafter", ["none", "nextn", "dspark"])
@pytest.mark.parametrize("fmt", ["fp8fp4", "bf16", "fp8"])
def test_both_spellings_give_the_same_config(drafter: Drafter, fmt: Any) -> None:
    raw = tiny_hf_config(drafter=drafter, fmt=fmt)
    inference = inference_config(raw) | {"n_mtp_layers": raw["num_nextn_predict_layers"]}
    assert from_inference(inference) == from_hf(raw)


def test_the_inference_spelling_may_leave_out_the_count_of_drafter_blocks() -> None:
    raw = inference_config(tiny_hf_config(drafter="nextn"))
    del raw["n_mtp_layers"]
    assert from_inference(raw).num_nextn_predict_layers == 1


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("vocab_size", 0, "at least 1"),
        ("vocab_size", True, "whole number"),
        ("vocab_size", 512.0, "whole number"),
        ("vocab_size", "512", "whole number"),
        ("vocab_size", None, "whole number"),
        ("hidden_size", -256, "at least 1"),
        ("hidden_size", 320, "multiple of 128"),
        ("q_lora_rank", 96, "multiple of 128"),
        ("moe_intermediate_size", 64, "multiple of 128"),
        ("o_lora_rank", 96, "divide by 128"),
        ("num_hash_layers", 8, "at most 7"),
        ("num_hash_layers", -1, "at least 0"),
        ("num_nextn_predict_layers", -1, "at least 0"),
        ("num_key_value_heads", 2, "must be 1"),
        ("num_key_value_heads", True, "must be 1"),
        ("n_shared_experts", 2, "must be 1"),
        ("num_experts_per_tok", 9, "at most 8 experts"),
        ("head_dim", 64, r"64 \+ a multiple of 64"),
        ("head_dim", 160, r"64 \+ a multiple of 64"),
        ("qk_rope_head_dim", 63, "even"),
        ("index_head_dim", 96, "power of two >= 64"),
        ("index_head_dim", 32, "power of two >= 64"),
        ("o_groups", 3, "divisor of 4 heads"),
        ("rope_theta", 0, "finite number > 1"),
        ("rope_theta", "10000", "finite number"),
        ("swiglu_limit", 0, "finite number > 0"),
        ("swiglu_limit", float("nan"), "finite number"),
        ("hc_eps", 0, "finite number > 0"),
        ("routed_scaling_factor", True, "finite number"),
        ("scoring_func", "sigmoid", "sqrtsoftplus"),
        ("topk_method", "greedy", "noaux_tc"),
        ("norm_topk_prob", False, "True"),
        ("norm_topk_prob", 1, "True"),
        ("hidden_act", "gelu", "silu"),
        ("tie_word_embeddings", True, "False"),
        ("attention_bias", True, "False"),
        ("expert_dtype", "int4", "one of fp4, fp8, bf16"),
        ("expert_dtype", "bf16", "fp4 or fp8"),
        ("bos_token_id", 512, "vocabulary of 512"),
        ("eos_token_id", -1, "at least 0"),
        ("compress_ratios", [0, 0, 4, 128, 4, 128], "at least 7 entries"),
        ("compress_ratios", [0, 0, 4, 64, 4, 128, 4], "each 0, 4 or 128"),
        ("compress_ratios", [0, 0, 4, 128, 4, 128, 4, 4], "0 after entry 6"),
        ("compress_ratios", [False, 0, 4, 128, 4, 128, 4], "whole numbers"),
        ("compress_ratios", "0044", "a list"),
        ("architectures", ["LlamaForCausalLM"], "DeepseekV4ForCausalLM"),
        ("rope_scaling", None, "an object"),
        ("quantization_config", None, "an object"),
    ],
)
def test_each_bad_value_is_named(name: str, value: object, limit: str) -> None:
    with pytest.raises(CheckpointError, match=limit) as caught:
        from_hf(tiny_hf_config() | {name: value})
    assert caught.value.param == name
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("rope_scaling", "type", "linear"),
        ("rope_scaling", "rope_type", "default"),
        ("rope_scaling", "factor", 0),
        ("rope_scaling", "original_max_position_embeddings", 65536.5),
        ("rope_scaling", "mscale", 1.0),
        ("quantization_config", "weight_block_size", [32, 32]),
        ("quantization_config", "scale_fmt", "float"),
        ("quantization_config", "moe_quant_algo", "W4A16"),
        ("quantization_config", "group_size", 32),
        ("quantization_config", "modules_to_not_convert", []),
    ],
)
def test_groups_are_as_strict(group: str, name: str, value: object) -> None:
    raw = tiny_hf_config()
    with pytest.raises(CheckpointError, match=name) as caught:
        from_hf(raw | {group: raw[group] | {name: value}})
    assert caught.value.param == f"{group}.{name}"


def test_only_quantised_checkpoints_need_blocks_of_128() -> None:
    odd: dict[str, Any] = {"hidden_size": 96, "q_lora_rank": 40, "moe_intermediate_size": 24, "o_lora_rank": 20}
    assert from_hf(tiny_hf_config(fmt="bf16", **odd)).hidden_size == 96
    # the output of a projection needs no whole tiles
    assert from_hf(tiny_hf_config(num_attention_heads=2, head_dim=192, index_n_heads=3)).head_dim == 192


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="unknown field kv_source_layer_ids; refusing to guess") as caught:
        from_hf(tiny_hf_config(kv_source_layer_ids=[2]))
    assert caught.value.param == "kv_source_layer_ids"
    with pytest.raises(CheckpointError, match="unknown field max_batch_size"):
        from_inference(inference_config(tiny_hf_config()) | {"max_batch_size": 4})


def test_a_missing_quantisation_means_plain_bf16_only() -> None:
    raw = tiny_hf_config()
    del raw["quantization_config"]
    with pytest.raises(CheckpointError, match="bf16 where there is no quantization_config") as caught:
        from_hf(raw)
    assert caught.value.param == "expert_dtype"


def test_the_labels_of_an_nvfp4_export_are_known() -> None:
    raw = tiny_hf_config()
    labels = {"moe_quant_algo": "NVFP4", "group_size": 16, "quant_algo": "MIXED_PRECISION", "ignore": ["mtp.*"]}
    assert from_hf(raw | {"quantization_config": raw["quantization_config"] | labels}) == from_hf(raw)


def test_a_list_without_the_drafter_gives_it_ratio_zero() -> None:
    raw = tiny_hf_config(drafter="dspark")
    short = from_hf(raw | {"compress_ratios": raw["compress_ratios"][:7]})
    assert short == from_hf(raw)
    assert short.drafter_ratios == (0, 0, 0)
    assert from_hf(tiny_hf_config(num_nextn_predict_layers=1)).drafter_ratios == (0,)
    assert from_hf(tiny_hf_config()).drafter_ratios == ()


@pytest.mark.parametrize("n_present", range(5))
def test_m05_only_all_or_none_of_the_four_keys_load(n_present: int) -> None:
    full = tiny_hf_config(drafter="dspark")
    for present in itertools.combinations(DSPARK_KEYS, n_present):
        raw = {k: v for k, v in full.items() if k not in DSPARK_KEYS or k in present}
        if n_present in (0, 4):
            assert (from_hf(raw).dspark is not None) == (n_present == 4)
            continue
        with pytest.raises(CheckpointError, match="refusing to guess") as caught:
            from_hf(raw)
        said = str(caught.value).split(" but lacks ")[0]
        assert [k for k in DSPARK_KEYS if k in said] == list(present)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("dspark_block_size", 0, "at least 1"),
        ("dspark_markov_rank", 1.5, "whole number"),
        ("dspark_noise_token_id", 512, "at most 511"),
        ("dspark_target_layer_ids", [], "not empty"),
        ("dspark_target_layer_ids", [5, 4], "ascending"),
        ("dspark_target_layer_ids", [4, 4], "ascending"),
        ("dspark_target_layer_ids", [7], r"in \[0, 7\)"),
    ],
)
def test_bad_drafter_fields_are_named(name: str, value: object, limit: str) -> None:
    with pytest.raises(CheckpointError, match=limit) as caught:
        from_hf(tiny_hf_config(drafter="dspark") | {name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "deepseek_v41"},
        {"model_type": "deepseek_v41_text"},
        {"architectures": ["DeepseekV41ForCausalLM"]},
    ],
)
def test_v41_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=r"DeepSeek-V4\.1"):
        from_hf(tiny_hf_config() | change)


@pytest.mark.parametrize("found", ["llama", "deepseek_v3", None, 4])
def test_m05_another_model_is_refused_by_name(found: object) -> None:
    with pytest.raises(NotACheckpoint, match=f"model_type {found!r}"):
        from_hf(tiny_hf_config() | {"model_type": found})


def test_aliases_must_say_the_same() -> None:
    raw = tiny_hf_config()
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    yarn = {k: v for k, v in raw["rope_scaling"].items() if k != "type"}
    aliases: dict[str, Any] = {
        "layer_types": [kinds[r] for r in raw["compress_ratios"]],
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 4,
        "compress_rates": {kinds[4]: 4, kinds[128]: 128},
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "compress": {"rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0, **yarn},
        },
    }
    assert from_hf(raw | aliases) == from_hf(raw)
    wrong: dict[str, Any] = {
        "layer_types": aliases["layer_types"][::-1],
        "mlp_layer_types": ["moe"] * 7,
        "compress_rates": {kinds[4]: 8, kinds[128]: 128},
        "rope_parameters": aliases["rope_parameters"]
        | {"compress": {"rope_type": "yarn", "rope_theta": 40000, **yarn}},
    }
    for name, value in wrong.items():
        with pytest.raises(CheckpointError, match=name):
            from_hf(raw | aliases | {name: value})


class TestBothFiles:
    @pytest.mark.parametrize("drafter", ["none", "nextn", "dspark"])
    def test_agreeing_files_load(self, drafter: Drafter, tmp_path: Path) -> None:
        raw = tiny_hf_config(drafter=drafter)
        assert read_config(write(tmp_path, raw, inference_config(raw))) == from_hf(raw)

    def test_one_drafter_block_may_stand_for_the_three_stages(self, tmp_path: Path) -> None:
        raw = tiny_hf_config(drafter="dspark")
        inference = inference_config(raw)
        assert (raw["num_nextn_predict_layers"], inference["n_mtp_layers"]) == (1, 3)
        assert read_config(write(tmp_path, raw, inference)).drafter_ratios == (0, 0, 0)

    def test_without_the_four_keys_the_counts_must_agree(self, tmp_path: Path) -> None:
        raw = tiny_hf_config(drafter="nextn")
        with pytest.raises(CheckpointError, match="num_nextn_predict_layers is 1, n_mtp_layers is 3"):
            read_config(write(tmp_path, raw, inference_config(raw) | {"n_mtp_layers": 3}))

    @pytest.mark.parametrize(
        ("name", "spelling", "value"),
        [
            ("compress_rope_theta", "compress_rope_theta", 40000),
            ("rope_factor", "rope_factor", 40),
            ("original_max_position_embeddings", "original_seq_len", 4096),
            ("num_hash_layers", "n_hash_layers", 0),
            ("routed_scaling_factor", "route_scale", 1),
            ("hidden_size", "dim", 512),
            ("compress_ratios", "compress_ratios", [0, 0, 128, 4, 4, 128, 4, 0, 0, 0]),
            ("rms_norm_eps", "norm_eps", 1e-5),
            ("expert_dtype", "expert_dtype", "fp8"),
            ("quantized", "dtype", "bf16"),
        ],
    )
    def test_a_disagreement_names_the_field_and_both_values(
        self, name: str, spelling: str, value: object, tmp_path: Path
    ) -> None:
        raw = tiny_hf_config(drafter="dspark")
        inference = inference_config(raw) | {spelling: value}
        if spelling == "dtype":
            inference["expert_dtype"] = "bf16"
        with pytest.raises(CheckpointError, match="disagree") as caught:
            read_config(write(tmp_path, raw, inference))
        named = {name} if name != "quantized" else {"quantized", "expert_dtype"}
        assert caught.value.param in named
        assert spelling in str(caught.value) or name == "quantized"

    def test_a_disagreement_about_the_drafter_names_its_key(self, tmp_path: Path) -> None:
        raw = tiny_hf_config(drafter="dspark")
        inference = inference_config(raw) | {"dspark_block_size": 7}
        with pytest.raises(CheckpointError, match="dspark_block_size is 7"):
            read_config(write(tmp_path, raw, inference))

    def test_a_drafter_in_one_file_only_is_a_disagreement(self, tmp_path: Path) -> None:
        raw = tiny_hf_config(drafter="dspark")
        inference = {k: v for k, v in inference_config(raw).items() if not k.startswith("dspark_")}
        with pytest.raises(CheckpointError, match="disagree"):
            read_config(write(tmp_path, raw, inference))

    def test_a_bf16_copy_may_keep_the_quantised_inference_config(self, tmp_path: Path) -> None:
        raw = tiny_hf_config(fmt="bf16")
        inference = inference_config(tiny_hf_config())
        assert not read_config(write(tmp_path, raw, inference)).quantized


class TestFiles:
    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(NotACheckpoint, match="there is no folder"):
            read_config(tmp_path / "absent")

    def test_a_file_instead_of_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "x.safetensors").touch()
        with pytest.raises(NotACheckpoint, match="is a file; give the folder"):
            read_config(tmp_path / "x.safetensors")

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(NotACheckpoint, match=r"has no config\.json"):
            read_config(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[]", '{"hc_eps": NaN}', '{"a": 1, "a": 2}'])
    def test_broken_json(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(DamagedCheckpoint, match=r"config\.json: "):
            read_config(tmp_path)

    def test_broken_inference_json(self, tmp_path: Path) -> None:
        write(tmp_path, tiny_hf_config(), {})
        (tmp_path / "inference" / "config.json").write_text("{")
        with pytest.raises(DamagedCheckpoint, match=r"inference/config\.json: "):
            read_config(tmp_path)
