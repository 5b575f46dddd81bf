from __future__ import annotations

from pathlib import Path

import pytest

from dsv4nb.checkpoint.identity import name_of, provenance_of, repository_of

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
