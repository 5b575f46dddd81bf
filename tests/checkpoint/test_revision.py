from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4nb.checkpoint.census import DSPARK_KEYS
from dsv4nb.checkpoint.config import from_hf
from dsv4nb.checkpoint.inventory import Drafter
from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.checkpoint.revision import Detection, Revision, detect_contract, detect_encoding
from dsv4nb.contract import CLAMP_ONLY, REF_FP8_ROUND
from dsv4nb.errors import CheckpointError, NotACheckpoint, UnsupportedModel
from dsv4nb.testing.tiny_checkpoint import tiny_hf_config

LADDER = """
import os
os.abort()  # reading must not run it
REASONING_EFFORT_PROMPTS = {"low": "a", "high": "b", "max": "c"}
DEFAULT_REASONING_EFFORT = "low"
"""
ANNOTATED_LADDER = """
REASONING_EFFORT_PROMPTS: dict[str, str] = {"low": "a", "medium": "-", "high": "b", "max": "c"}
DEFAULT_REASONING_EFFORT: str = "low"
"""
SINGLE = 'REASONING_EFFORT_MAX = ("a" "b")\n'


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Make a folder of that name, with that encoder file."""

    def make(name: str = "model", encoder: str | bytes | None = None) -> Path:
        path = tmp_path / name
        path.mkdir()
        if encoder is not None:
            (path / "encoding").mkdir()
            data = encoder.encode() if isinstance(encoder, str) else encoder
            (path / "encoding" / "encoding_dsv4.py").write_bytes(data)
        return path

    return make


PREVIEW = tiny_hf_config(drafter="nextn")
DSPARK = tiny_hf_config(drafter="dspark")


@pytest.mark.parametrize(
    ("name", "raw", "encoder", "answer", "certain"),
    [
        # the encoder file decides where it is there
        ("DeepSeek-V4-Flash", PREVIEW, SINGLE, "preview", True),
        ("DeepSeek-V4-Flash-0731", DSPARK, LADDER, "v0731", True),
        ("DeepSeek-V4-Flash-0731", DSPARK, ANNOTATED_LADDER, "v0731", True),
        ("DeepSeek-V4-Flash-DSpark", DSPARK, SINGLE, "preview", True),
        ("DeepSeek-V4-Flash-0731", DSPARK, SINGLE, "preview", True),
        ("DeepSeek-V4-Flash", PREVIEW, LADDER, "v0731", True),
        # the census and the name where it is not
        ("DeepSeek-V4-Flash", PREVIEW, None, "preview", True),
        ("DeepSeek-V4-Flash-DSpark", DSPARK, None, "preview", True),
        ("DeepSeek-V4-Pro-DSpark", DSPARK, None, "preview", True),
        ("DeepSeek-V4-Flash-0731", DSPARK, None, "v0731", True),
        ("DeepSeek-V4-Pro-0813", DSPARK, None, "v0731", True),
        ("my-copy", DSPARK, None, "v0731", False),
        ("DSpark-copy", DSPARK, None, "v0731", False),
        # an encoder file that tells nothing leaves a doubt
        ("DeepSeek-V4-Flash", PREVIEW, "x = 1\n", "preview", False),
        ("DeepSeek-V4-Flash", PREVIEW, LADDER + SINGLE, "preview", False),
        ("DeepSeek-V4-Flash-0731", DSPARK, "def (\n", "v0731", False),
        ("DeepSeek-V4-Flash-0731", DSPARK, b"\0", "v0731", False),
        ("DeepSeek-V4-Flash-0731", DSPARK, "(" * 5000, "v0731", False),
        ("DeepSeek-V4-Flash", PREVIEW, LADDER.replace('"low"\n', '"high"\n'), "preview", False),
        ("DeepSeek-V4-Flash", PREVIEW, LADDER.replace('"max"', '"top"'), "preview", False),
        # only top-level assignments count, and text inside strings does not
        ("my-copy", DSPARK, "def f():\n    REASONING_EFFORT_MAX = 1\n", "v0731", False),
        ("my-copy", DSPARK, '"""REASONING_EFFORT_MAX = 1"""\n', "v0731", False),
        # a file in an older spelling of escapes must not warn
        ("DeepSeek-V4-Flash", PREVIEW, SINGLE + 'p = "\\d"\n', "preview", True),
    ],
)
def test_the_detection_table(
    name: str, raw: dict[str, Any], encoder: str | bytes | None, answer: str, certain: bool, folder: Callable[..., Path]
) -> None:
    found = detect_encoding(folder(name, encoder), raw)
    assert (found.revision, found.certain) == (answer, certain)
    assert found.reason


def test_a_released_file_is_known_by_its_hash(folder: Callable[..., Path]) -> None:
    source = b"anything at all, even ( what does not parse"
    known: dict[str, Revision] = {hashlib.sha256(source).hexdigest(): "v0731"}
    assert detect_encoding(folder("a", source), PREVIEW, known) == Detection(
        revision="v0731", reason="encoding/encoding_dsv4.py is the released file", certain=True
    )
    # one byte more and it must be parsed
    assert not detect_encoding(folder("b", source + b" "), PREVIEW, known).certain


def test_a_huge_encoder_file_is_not_read(folder: Callable[..., Path]) -> None:
    found = detect_encoding(folder("m", LADDER + "#" * (1 << 20)), PREVIEW)
    assert (found.revision, found.certain) == ("preview", False)
    assert "more than the 1048576 that are read" in found.reason


@pytest.mark.parametrize(("profile", "answer"), [("preview", "preview"), ("official", "v0731")])
def test_the_profile_key_wins(profile: str, answer: str, folder: Callable[..., Path]) -> None:
    raw = DSPARK | {"dsv4_reasoning_effort_profile": profile}
    assert from_hf(raw) == from_hf(DSPARK)
    found = detect_encoding(folder("DeepSeek-V4-Flash-0731", LADDER), raw)
    assert (found.revision, found.certain) == (answer, True)


@pytest.mark.parametrize("value", ["v0731", "", None, 1])
def test_an_unknown_profile_is_refused(value: object, folder: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match="one of preview, official"):
        detect_encoding(folder(), PREVIEW | {"dsv4_reasoning_effort_profile": value})


def test_part_of_the_census_is_refused_even_with_an_encoder_file(folder: Callable[..., Path]) -> None:
    path = folder("m", LADDER)
    for missing in DSPARK_KEYS:
        raw = {k: v for k, v in DSPARK.items() if k != missing}
        with pytest.raises(CheckpointError, match=f"lacks {missing}; refusing to guess"):
            detect_encoding(path, raw)


def test_other_models_are_refused(folder: Callable[..., Path]) -> None:
    path = folder()
    with pytest.raises(UnsupportedModel):
        detect_encoding(path, {"model_type": "deepseek_v41"})
    with pytest.raises(UnsupportedModel):
        detect_encoding(path, {"model_type": "deepseek_v4", "architectures": ["DeepseekV41ForCausalLM"]})
    with pytest.raises(NotACheckpoint):
        detect_encoding(path, {"model_type": "llama"})


def test_without_a_config_nothing_is_known(folder: Callable[..., Path]) -> None:
    assert detect_encoding(folder(), None) == Detection(revision=None, reason="there is no config.json", certain=False)


def test_a_cache_snapshot_is_judged_by_its_repository(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--deepseek-ai--DeepSeek-V4-Flash-DSpark" / "snapshots" / ("62af8fff" * 5)
    snapshot.mkdir(parents=True)
    found = detect_encoding(snapshot, DSPARK)
    assert (found.revision, found.certain) == ("preview", True)


@pytest.mark.parametrize(
    ("drafter", "names", "contract"),
    [
        ("none", ["layers.0.ffn.experts.0.w1.scale"], REF_FP8_ROUND),
        ("nextn", ["layers.0.ffn.experts.0.w1.scale"], REF_FP8_ROUND),
        ("dspark", ["layers.0.ffn.experts.0.w1.scale"], REF_FP8_ROUND),
        ("nextn", ["layers.0.ffn.experts.0.w1.weight_scale_2"], CLAMP_ONLY),
        ("none", ["layers.0.ffn.experts.0.w1.weight_scale_2"], CLAMP_ONLY),
        ("dspark", ["layers.0.ffn.experts.0.w1.weight_scale_2"], REF_FP8_ROUND),
    ],
)
def test_m05_only_nvfp4_without_the_census_is_clamp_only(drafter: Drafter, names: list[str], contract: object) -> None:
    found, reason = detect_contract(from_hf(tiny_hf_config(drafter=drafter)), names)
    assert found is contract
    assert reason


@pytest.mark.parametrize(("drafter", "fmt"), [("nextn", "nvfp4"), ("nextn", "fp8fp4"), ("dspark", "nvfp4")])
def test_an_opened_checkpoint_carries_its_contract(drafter: str, fmt: str, tiny: Callable[..., Path]) -> None:
    opened = open_checkpoint(tiny(drafter, fmt))
    assert opened.contract is (CLAMP_ONLY if (drafter, fmt) == ("nextn", "nvfp4") else REF_FP8_ROUND)
    assert "NVFP4" in opened.contract_reason or "dspark" in opened.contract_reason
