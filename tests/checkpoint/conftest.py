"""The released configs, and tiny checkpoints to damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4nb.checkpoint.synthetic import hf_config
from dsv4nb.testing.tiny_checkpoint import write_tiny_checkpoint

_PRO: dict[str, Any] = {
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
_PRO_RATIOS = [128, 128, *[4, 128] * 29, 4]


@pytest.fixture(scope="session")
def releases() -> dict[str, dict[str, Any]]:
    """config.json of the releases, by name."""
    return {
        "preview": hf_config("flash"),
        "0731": hf_config("flash-0731"),
        "pro": hf_config("flash", _PRO | {"compress_ratios": [*_PRO_RATIOS, 0]}),
        "pro-0813": hf_config(
            "flash-0731", _PRO | {"compress_ratios": [*_PRO_RATIOS, 0, 0, 0], "dspark_markov_rank": 512}
        ),
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
