"""The released configs, and tiny checkpoints to damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4nb.testing.tiny_checkpoint import tiny_hf_config, write_tiny_checkpoint

_FLASH: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "swiglu_limit": 10.0,
}
_PRO = _FLASH | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
}
_FLASH_RATIOS = [0, 0, *[4, 128] * 20, 4]
_PRO_RATIOS = [128, 128, *[4, 128] * 29, 4]


def _dspark(rank: int, taps: list[int]) -> dict[str, Any]:
    return {
        "dspark_block_size": 5,
        "dspark_markov_rank": rank,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": taps,
    }


@pytest.fixture(scope="session")
def releases() -> dict[str, dict[str, Any]]:
    """config.json of the releases, by name."""
    flash_dspark = _FLASH | _dspark(256, [40, 41, 42])
    pro_dspark = _PRO | _dspark(512, [58, 59, 60])
    return {
        "preview": tiny_hf_config(drafter="nextn", **_FLASH, compress_ratios=[*_FLASH_RATIOS, 0]),
        "0731": tiny_hf_config(drafter="dspark", **flash_dspark, compress_ratios=[*_FLASH_RATIOS, 0, 0, 0]),
        "pro": tiny_hf_config(drafter="nextn", **_PRO, compress_ratios=[*_PRO_RATIOS, 0]),
        "pro-0813": tiny_hf_config(drafter="dspark", **pro_dspark, compress_ratios=[*_PRO_RATIOS, 0, 0, 0]),
    }


@pytest.fixture(scope="session")
def _originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    root = tmp_path_factory.mktemp("originals")

    def original(drafter: str, fmt: str) -> Path:
        folder = root / f"{drafter}-{fmt}"
        if not folder.exists():
            write_tiny_checkpoint(folder, drafter=drafter, fmt=fmt)  # type: ignore[arg-type]
            (folder / "tokenizer.json").write_text("{}")
        return folder

    return original


Tiny = Callable[..., Path]


@pytest.fixture
def tiny(_originals: Callable[[str, str], Path], tmp_path: Path) -> Tiny:
    """Make a checkpoint that the test may damage: `tiny(drafter=…, fmt=…, name=…)`."""

    def make(drafter: str = "dspark", fmt: str = "fp8fp4", name: str = "tiny") -> Path:
        return Path(shutil.copytree(_originals(drafter, fmt), tmp_path / name))

    return make
