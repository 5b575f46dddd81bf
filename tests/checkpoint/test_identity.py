from __future__ import annotations

from pathlib import Path

import pytest

from dsv4nb.checkpoint.identity import SAMPLE_BYTES, fingerprint_of, name_of, provenance_of, repository_of

SHA = "7872f01b" * 5
SNAPSHOT = Path("/cache/models--deepseek-ai--DeepSeek-V4-Flash-0731/snapshots") / SHA


@pytest.mark.parametrize(
    ("folder", "label", "name"),
    [
        (Path("/m/DeepSeek-V4-Flash"), None, "DeepSeek-V4-Flash"),
        (Path("/m/copy"), "deepseek-ai/DeepSeek-V4-Flash-0731", "DeepSeek-V4-Flash-0731"),
        (Path("/m/copy"), "/home/x/models/mine/", "mine"),
        (Path("/m/copy"), SHA, "copy"),
        (Path("/m/copy"), "", "copy"),
        (Path("/m/copy"), "./", "copy"),
        (Path("/m/copy"), 7, "copy"),
        (SNAPSHOT, None, "DeepSeek-V4-Flash-0731"),
        (SNAPSHOT, SHA, "DeepSeek-V4-Flash-0731"),
        (Path("/m/flash") / SHA, None, "flash"),
        (Path("/") / SHA, None, "dsv4"),
    ],
)
def test_a_commit_hash_is_no_name(folder: Path, label: object, name: str) -> None:
    assert name_of(folder, {} if label is None else {"_name_or_path": label}) == name


def test_provenance_names_the_repository() -> None:
    assert repository_of(SNAPSHOT) == ("deepseek-ai/DeepSeek-V4-Flash-0731", SHA)
    assert provenance_of(SNAPSHOT) == f"deepseek-ai/DeepSeek-V4-Flash-0731 at {SHA}"
    assert provenance_of(Path("/m/copy")) == "local folder /m/copy"
    assert repository_of(Path("/m/snapshots/x")) is None


@pytest.fixture
def weights(tmp_path: Path) -> list[Path]:
    (tmp_path / "config.json").write_text("{}")
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(3 * SAMPLE_BYTES))
    return [tmp_path / "a", tmp_path / "b"]


def test_a_fingerprint_depends_on_nothing_but_the_files(weights: list[Path]) -> None:
    config = weights[0].parent / "config.json"
    before = fingerprint_of(config, weights)
    assert fingerprint_of(config, reversed(weights)) == before


@pytest.mark.parametrize("at", [0, SAMPLE_BYTES - 1, 2 * SAMPLE_BYTES, 3 * SAMPLE_BYTES - 1])
def test_other_weights_have_another_fingerprint(weights: list[Path], at: int) -> None:
    config = weights[0].parent / "config.json"
    before = fingerprint_of(config, weights)
    changed = bytearray(weights[1].read_bytes())
    changed[at] = 1
    weights[1].write_bytes(changed)
    assert fingerprint_of(config, weights) != before


def test_another_config_or_length_has_another_fingerprint(weights: list[Path]) -> None:
    config = weights[0].parent / "config.json"
    before = fingerprint_of(config, weights)
    weights[0].write_bytes(bytes(3 * SAMPLE_BYTES + 1))
    longer = fingerprint_of(config, weights)
    config.write_text('{"a": 1}')
    assert len({before, longer, fingerprint_of(config, weights)}) == 3
