"""What a checkpoint is called and where it comes from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_SHA = re.compile(r"[0-9a-f]{7,64}")


def repository_of(folder: Path) -> tuple[str, str] | None:
    """Repository and revision when `folder` is a snapshot of a Hugging Face cache, else None."""
    snapshots = folder.parent
    owner = snapshots.parent.name
    if snapshots.name != "snapshots" or not owner.startswith("models--"):
        return None
    return owner.removeprefix("models--").replace("--", "/", 1), folder.name


def name_of(folder: Path, raw_config: Mapping[str, Any]) -> str:
    """A name for people: what config.json calls itself, else the repository, else the folder.

    A commit hash names nothing and is passed over.
    """
    label = raw_config.get("_name_or_path")
    from_config = re.split(r"[/\\]", label.rstrip("/\\"))[-1] if isinstance(label, str) else ""
    repository = repository_of(folder)
    from_cache = repository[0].rpartition("/")[2] if repository else ""
    candidates = (from_config, from_cache, folder.name, folder.parent.name)
    return next((n for n in candidates if n.strip(". ") and not _SHA.fullmatch(n)), "dsv4")


def provenance_of(folder: Path) -> str:
    """Where the files come from, in words."""
    repository = repository_of(folder)
    if repository is None:
        return f"local folder {folder}"
    return f"{repository[0]} at {repository[1]}"


SAMPLE_BYTES = 65536  # of the beginning and the end of each tensor file


def fingerprint_of(config_json: Path, files: Iterable[Path]) -> str:
    """Return a SHA-256 that tells one set of weights from another without reading all of them.

    It covers config.json, and of every tensor file its name, size, beginning and end: the headers, and weights of the
    first and the last tensors, which no two trainings share.
    """
    digest = hashlib.sha256(config_json.read_bytes())
    for path in sorted(set(files)):
        size = path.stat().st_size
        digest.update(f"\n{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
