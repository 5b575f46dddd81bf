from __future__ import annotations

from pathlib import Path

import pytest

from dsv4nb.checkpoint.probe import is_dsv4_dir


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (None, False),
        ("{ broken", False),
        ('{"model_type": "llama"}', False),
        ('{"model_type": "deepseek_v4"}', True),
        ('{"model_type": "deepseek_v41"}', False),
        ('{"model_type": "llama", "note": "not \\"model_type\\": \\"deepseek_v4\\""}', False),
        ('{"model_type": ["deepseek_v4"]}', False),
        ('["deepseek_v4"]', False),
        ("[" * 100_000, False),
        ("", False),
    ],
)
def test_m01_answers_from_parsed_json(text: str | None, answer: bool, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert is_dsv4_dir(tmp_path) is answer


def test_m01_what_is_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "config.json").write_bytes(b"\xff\xfe\x00{")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "binary", "~nobody-here/x", "a\0b", ""):
        assert is_dsv4_dir(path) is False


def test_takes_a_string(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    assert is_dsv4_dir(str(tmp_path))
