from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4nb.checkpoint.config import ModelConfig, from_hf
from dsv4nb.checkpoint.headers import TensorEntry
from dsv4nb.checkpoint.inventory import (
    Drafter,
    ExpertFormat,
    Spec,
    differences,
    drafter_of,
    expected_tensors,
    expert_format_of,
)
from dsv4nb.checkpoint.names import parse_name
from dsv4nb.errors import CheckpointError
from dsv4nb.testing.tiny_checkpoint import tiny_hf_config


def entries_of(expected: dict[str, Spec]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(
            name=name, dtype=s.dtype, shape=s.shape, file=Path("x.safetensors"), offset=8, nbytes=s.nbytes
        )
        for name, s in expected.items()
    }


@pytest.mark.parametrize(
    ("release", "drafter", "n_tensors", "n_bytes"),
    [
        ("preview", "nextn", 69_187, 159_609_485_896),
        ("0731", "dspark", 72_317, 166_878_536_440),
        ("pro", "nextn", 145_116, 864_704_792_696),
        ("pro-0813", "dspark", 149_782, 892_727_580_904),
    ],
)
def test_reproduces_the_totals_of_the_releases(
    release: str, drafter: Drafter, n_tensors: int, n_bytes: int, releases: dict[str, dict[str, Any]]
) -> None:
    expected = expected_tensors(from_hf(releases[release]), drafter, "fp4")
    assert len(expected) == n_tensors
    assert sum(s.nbytes for s in expected.values()) == n_bytes


@pytest.mark.parametrize(
    ("release", "drafter", "counts"),
    [
        ("preview", "nextn", {"I8": 33792, "F8_E8M0": 34167, "F8_E4M3": 375, "BF16": 433, "F32": 417, "I64": 3}),
        ("0731", "dspark", {"I8": 35328, "F8_E8M0": 35718, "F8_E4M3": 390, "BF16": 445, "F32": 433, "I64": 3}),
    ],
)
def test_reproduces_the_counts_per_dtype(
    release: str, drafter: Drafter, counts: dict[str, int], releases: dict[str, dict[str, Any]]
) -> None:
    expected = expected_tensors(from_hf(releases[release]), drafter, "fp4")
    assert Counter(s.dtype for s in expected.values()) == counts


def shard_bytes(expected: dict[str, Spec]) -> Counter[str]:
    total: Counter[str] = Counter()
    for text, spec in expected.items():
        name = parse_name(text)
        top = "embed" if text == "embed.weight" else "head"
        total[top if name.layer is None else f"{name.stack}.{name.layer}"] += spec.nbytes
    return total


def test_reproduces_the_payload_of_each_shard(releases: dict[str, dict[str, Any]]) -> None:
    preview = shard_bytes(expected_tensors(from_hf(releases["preview"]), "nextn", "fp4"))
    dspark = shard_bytes(expected_tensors(from_hf(releases["0731"]), "dspark", "fp4"))
    assert len(preview) == 46
    assert len(dspark) == 48
    assert preview["mtp.0"] == 3_593_787_756
    assert [dspark[f"mtp.{k}"] for k in range(3)] == [3_610_287_448, 3_559_944_536, 3_692_606_316]
    for shards in (preview, dspark):
        assert shards["embed"] == 1_059_061_760
        assert shards["head"] == 1_059_332_116
        assert shards["layers.0"] == shards["layers.1"] == 3_566_148_952
        assert shards["layers.2"] == 3_596_055_640
        assert {shards[f"layers.{i}"] for i in range(3, 43, 2)} == {3_568_596_312}
        assert {shards[f"layers.{i}"] for i in range(4, 43, 2)} == {3_589_851_224}


def test_the_routed_experts_are_most_of_a_layer(releases: dict[str, dict[str, Any]]) -> None:
    expected = expected_tensors(from_hf(releases["0731"]), "dspark", "fp4")
    experts = {n: s for n, s in expected.items() if parse_name(n).expert is not None}
    assert sum(s.nbytes for n, s in experts.items() if n.startswith("layers.7.")) == 3_422_552_064
    assert sum(s.nbytes for n, s in experts.items() if n.startswith("mtp.1.ffn.experts.9.")) == 13_369_344


@pytest.mark.parametrize("n_experts", [160, 178, 132])
def test_a_pruned_model_changes_only_what_counts_experts(n_experts: int, releases: dict[str, dict[str, Any]]) -> None:
    c = from_hf(releases["0731"])
    full = expected_tensors(c, "dspark", "fp4")
    pruned = expected_tensors(replace(c, n_routed_experts=n_experts), "dspark", "fp4")
    changed = {parse_name(n).part for n in full if n in pruned and full[n] != pruned[n]}
    assert changed == {"ffn.gate.weight", "ffn.gate.bias"}
    assert {parse_name(n).expert for n in full.keys() - pruned.keys()} == set(range(n_experts, 256))
    assert not pruned.keys() - full.keys()


@pytest.mark.parametrize(
    ("expert_format", "specs"),
    [
        ("fp4", {"weight": Spec("I8", (2048, 2048)), "scale": Spec("F8_E8M0", (2048, 128))}),
        ("fp8", {"weight": Spec("F8_E4M3", (2048, 4096)), "scale": Spec("F32", (16, 32))}),
        ("bf16", {"weight": Spec("BF16", (2048, 4096))}),
        (
            "nvfp4",
            {
                "weight": Spec("U8", (2048, 2048)),
                "weight_scale": Spec("F8_E4M3", (2048, 256)),
                "weight_scale_2": Spec("F32", ()),
                "input_scale": Spec("F32", (), required=False),
            },
        ),
    ],
)
def test_the_formats_of_an_expert(
    expert_format: ExpertFormat, specs: dict[str, Spec], releases: dict[str, dict[str, Any]]
) -> None:
    expected = expected_tensors(from_hf(releases["0731"]), "dspark", expert_format)
    prefix = "layers.5.ffn.experts.3.w3."
    assert {n.removeprefix(prefix): s for n, s in expected.items() if n.startswith(prefix)} == specs
    # an NVFP4 export leaves the drafter as it was
    drafted = expected["mtp.1.ffn.experts.3.w3.weight"].dtype
    assert drafted == {"nvfp4": "I8"}.get(expert_format, specs["weight"].dtype)


def test_a_plain_checkpoint_has_no_scales() -> None:
    expected = expected_tensors(from_hf(tiny_hf_config(drafter="dspark", fmt="bf16")), "dspark", "bf16")
    assert {s.dtype for s in expected.values()} == {"BF16", "F32", "I64"}
    assert not any(n.endswith(".scale") for n in expected)


def test_a_matrix_of_no_whole_tiles_has_scales_at_the_edges() -> None:
    c = from_hf(tiny_hf_config(num_attention_heads=2, head_dim=192, index_n_heads=3))
    assert expected_tensors(c, "none", "fp4")["layers.0.attn.wkv.scale"] == Spec("F8_E8M0", (2, 2))


@pytest.fixture
def config() -> ModelConfig:
    return from_hf(tiny_hf_config(drafter="nextn"))


@pytest.fixture
def dspark_config() -> ModelConfig:
    return from_hf(tiny_hf_config(drafter="dspark"))


class TestDrafter:
    def test_is_told_from_the_names(self, config: ModelConfig, dspark_config: ModelConfig) -> None:
        assert drafter_of(config, expected_tensors(config, "nextn", "fp4")) == "nextn"
        assert drafter_of(config, expected_tensors(config, "none", "fp4")) == "none"
        assert drafter_of(dspark_config, expected_tensors(dspark_config, "dspark", "fp4")) == "dspark"

    def test_a_damaged_drafter_is_that_of_the_config(self, config: ModelConfig, dspark_config: ModelConfig) -> None:
        assert drafter_of(config, ["mtp.0.norm.weight"]) == "nextn"
        assert drafter_of(dspark_config, ["mtp.0.norm.weight"]) == "dspark"

    def test_a_contradiction_is_refused(self, config: ModelConfig, dspark_config: ModelConfig) -> None:
        with pytest.raises(CheckpointError, match=r"mtp\.0\.main_proj, but config\.json has no dspark_\* keys"):
            drafter_of(config, expected_tensors(dspark_config, "dspark", "fp4"))
        with pytest.raises(CheckpointError, match=r"mtp\.0\.e_proj, but config\.json has the four dspark_\* keys"):
            drafter_of(dspark_config, expected_tensors(config, "nextn", "fp4"))
        with pytest.raises(CheckpointError, match="e_proj and main_proj"):
            drafter_of(dspark_config, ["mtp.0.e_proj.weight", "mtp.0.main_proj.weight"])

    def test_keys_without_a_drafter_are_refused(self, dspark_config: ModelConfig) -> None:
        with pytest.raises(CheckpointError, match=r"there is no mtp\.\* tensor.*remove the four keys"):
            drafter_of(dspark_config, expected_tensors(dspark_config, "none", "fp4"))


def test_only_nvfp4_is_told_from_the_names(config: ModelConfig) -> None:
    assert expert_format_of(config, ["layers.0.ffn.experts.0.w1.weight"]) == "fp4"
    assert expert_format_of(config, ["layers.0.ffn.experts.0.w1.weight_scale_2"]) == "nvfp4"
    assert expert_format_of(replace(config, expert_dtype="fp8"), ["x.weight_scale_2"]) == "fp8"
    assert expert_format_of(replace(config, expert_dtype="bf16", quantized=False), []) == "bf16"


class TestDifferences:
    def test_a_complete_checkpoint_has_none(self, config: ModelConfig) -> None:
        expected = expected_tensors(config, "nextn", "fp4")
        assert differences(expected, entries_of(expected)) == []

    def test_each_kind_is_told_with_expected_and_found(self, config: ModelConfig) -> None:
        expected = expected_tensors(config, "nextn", "fp4")
        entries = entries_of(expected)
        del entries["layers.1.attn.wkv.scale"]
        entries["norm.weight"] = replace(entries["norm.weight"], shape=(257,))
        entries["layers.0.attn.attn_sink"] = replace(entries["layers.0.attn.attn_sink"], dtype="BF16")
        entries["layers.0.attn.wk.weight"] = replace(entries["norm.weight"], name="layers.0.attn.wk.weight")
        assert sorted(differences(expected, entries)) == [
            "layers.0.attn.attn_sink: expected F32 [4], found BF16 [4] in x.safetensors",
            "layers.0.attn.wk.weight: not of this model, found BF16 [257] in x.safetensors",
            "layers.1.attn.wkv.scale: missing, expected F8_E8M0 [1, 2]",
            "norm.weight: expected BF16 [256], found BF16 [257] in x.safetensors",
        ]

    def test_the_same_fault_of_many_experts_is_one_line(self, config: ModelConfig) -> None:
        expected = expected_tensors(config, "nextn", "fp4")
        entries = entries_of(expected)
        for e in (0, 1, 2, 5, 7):
            del entries[f"layers.4.ffn.experts.{e}.w2.weight"]
        del entries["layers.5.ffn.experts.6.w2.weight"]
        assert differences(expected, entries) == [
            "layers.4.ffn.experts.{0-2,5,7}.w2.weight: missing, expected I8 [256, 64]",
            "layers.5.ffn.experts.6.w2.weight: missing, expected I8 [256, 64]",
        ]

    def test_what_is_reported_elsewhere_is_not_repeated(self, config: ModelConfig) -> None:
        expected = expected_tensors(config, "nextn", "fp4")
        entries = entries_of(expected)
        del entries["embed.weight"]
        assert differences(expected, entries, frozenset(["embed.weight"])) == []

    def test_a_static_activation_scale_may_be_absent_and_scalars_have_two_spellings(self, config: ModelConfig) -> None:
        expected = expected_tensors(config, "nextn", "nvfp4")
        entries = {n: e for n, e in entries_of(expected).items() if not n.endswith(".input_scale")}
        name = "layers.0.ffn.experts.0.w1.weight_scale_2"
        entries[name] = replace(entries[name], shape=(1,))
        assert differences(expected, entries) == []
        entries[name] = replace(entries[name], shape=(2,))
        assert len(differences(expected, entries)) == 1
