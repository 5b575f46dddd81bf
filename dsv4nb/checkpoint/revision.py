"""Chat encoding and numeric contract of a checkpoint: detected, uncertain or refused.

The two are separate questions. The encoding is named by the encoder file that the release ships
(encoding.md 1); the contract by the kernel it was published with (model.md 4.4).
"""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsv4nb.checkpoint.census import has_dspark_keys
from dsv4nb.checkpoint.config import PROFILE_KEY, ModelConfig, require_this_model
from dsv4nb.checkpoint.identity import repository_of
from dsv4nb.contract import CLAMP_ONLY, REF_FP8_ROUND, Contract
from dsv4nb.errors import CheckpointError

Revision = Literal["preview", "v0731"]

ENCODER = Path("encoding") / "encoding_dsv4.py"
MAX_ENCODER_BYTES = 1 << 20  # the real files have 28 and 29 kB

KNOWN_ENCODERS: Mapping[str, Revision] = {
    "bdbd57c132a1b3725042323d02b98b9d1df28e5f388f134399555d041f5055e0": "preview",
    "abc0d26120250dda0ae077dc64aa28836026e61e970854aaeb792445e6a0dde6": "v0731",
}

_PROFILES: Mapping[str, Revision] = {"preview": "preview", "official": "v0731"}

OVERRIDE = "pass encoding='preview' or encoding='v0731' to settle it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """Which chat encoding a checkpoint uses.

    Attributes:
        revision: None when nothing tells.
        reason: what told, in words.
        certain: False when it is a guess; `OVERRIDE` says the way out.
    """

    revision: Revision | None
    reason: str
    certain: bool


def detect_encoding(
    folder: Path, raw_config: Mapping[str, Any] | None, known: Mapping[str, Revision] = KNOWN_ENCODERS
) -> Detection:
    """Tell the chat encoding of the checkpoint in `folder`; its encoder file is read, never run.

    Args:
        raw_config: config.json as parsed, None when there is none.
        known: sha256 of encoder files that need no look inside.

    Raises:
        NotACheckpoint, UnsupportedModel: the config is of another model.
        CheckpointError: some of the four `dspark_*` keys are there, or the profile key has an unknown value.
    """
    if raw_config is None:
        return Detection(revision=None, reason="there is no config.json", certain=False)
    require_this_model(raw_config)
    has_keys = has_dspark_keys(raw_config)
    if PROFILE_KEY in raw_config:
        return _from_profile(raw_config[PROFILE_KEY])
    found, unread = _from_encoder(folder / ENCODER, known)
    return found or _from_census(folder, has_keys, unread)


def detect_contract(config: ModelConfig, entries: Iterable[str]) -> tuple[Contract, str]:
    """Choose the roundings that the artifact was published with.

    Args:
        entries: tensor names.

    Returns:
        The contract and the reason, in words.
    """
    is_nvfp4 = any(name.endswith(".weight_scale_2") for name in entries)
    if is_nvfp4 and config.dspark is None:
        return (
            CLAMP_ONLY,
            "NVFP4 experts without dspark_* keys: published with the kernel that does not round the cache",
        )
    if config.dspark is not None:
        return REF_FP8_ROUND, "the four dspark_* keys: published with the kernel that rounds the cache to FP8"
    return (
        REF_FP8_ROUND,
        "no dspark_* keys and no NVFP4 experts: the current kernel of the preview rounds the cache to FP8",
    )


def _from_profile(value: object) -> Detection:
    revision = _PROFILES.get(value) if isinstance(value, str) else None
    if revision is None:
        raise CheckpointError(
            f"config.json: {PROFILE_KEY} is {value!r}; it must be one of {', '.join(_PROFILES)}", param=PROFILE_KEY
        )
    return Detection(revision=revision, reason=f"config.json sets {PROFILE_KEY} to {value!r}", certain=True)


def _from_encoder(path: Path, known: Mapping[str, Revision]) -> tuple[Detection | None, str | None]:
    """Read the encoder file. Without a result, the second value says why a file that is there told nothing."""
    try:
        if not path.is_file():
            return None, None
        size = path.stat().st_size
        if size > MAX_ENCODER_BYTES:
            return None, f"{ENCODER} has {size} bytes, more than the {MAX_ENCODER_BYTES} that are read"
        source = path.read_bytes()
    except OSError as e:
        return None, f"{ENCODER} cannot be read ({e.strerror})"
    revision = known.get(hashlib.sha256(source).hexdigest())
    if revision:
        return Detection(revision=revision, reason=f"{ENCODER} is the released file", certain=True), None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the escapes in somebody else's source
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None, f"{ENCODER} is not Python"
    names = dict(_assignments(tree))
    has_ladder = _keys(names.get("REASONING_EFFORT_PROMPTS")) >= {"low", "high", "max"} and (
        _text(names.get("DEFAULT_REASONING_EFFORT")) == "low"
    )
    has_max = "REASONING_EFFORT_MAX" in names
    if has_ladder == has_max:
        return None, f"{ENCODER} has the effort texts of {'both revisions' if has_max else 'neither revision'}"
    if has_ladder:
        return Detection(revision="v0731", reason=f"{ENCODER} has efforts low, high and max", certain=True), None
    return Detection(
        revision="preview", reason=f"{ENCODER} has the single effort text of the preview", certain=True
    ), None


def _from_census(folder: Path, has_keys: bool, unread: str | None) -> Detection:
    note = f" ({unread})" if unread else ""
    if not has_keys:
        return Detection(revision="preview", reason=f"config.json has no dspark_* keys{note}", certain=unread is None)
    name = _telling_name(folder)
    reason = f"config.json has the four dspark_* keys, and the name {name!r}"
    is_0731 = "0731" in name or "0813" in name
    if name.endswith("DSpark") and not is_0731:
        return Detection(revision="preview", reason=f"{reason} is of the DSpark preview{note}", certain=unread is None)
    if is_0731:
        return Detection(revision="v0731", reason=f"{reason} says so{note}", certain=unread is None)
    return Detection(revision="v0731", reason=f"{reason} does not tell a DSpark preview apart{note}", certain=False)


def _telling_name(folder: Path) -> str:
    """Repository name of a cache snapshot, else the folder's."""
    repository = repository_of(folder)
    return repository[0].rpartition("/")[2] if repository else folder.name


def _assignments(tree: ast.Module) -> Iterable[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ((t.id, node.value) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def _keys(node: ast.expr | None) -> set[str]:
    keys = node.keys if isinstance(node, ast.Dict) else []
    return {text for k in keys if (text := _text(k)) is not None}


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
