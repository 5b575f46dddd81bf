"""A folder → a checked checkpoint. Reads configs and headers only; nothing here needs torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from dsv4nb.checkpoint.config import ModelConfig, read_config, read_raw_config
from dsv4nb.checkpoint.headers import TensorEntry, scan
from dsv4nb.checkpoint.identity import name_of, provenance_of
from dsv4nb.checkpoint.inventory import (
    Drafter,
    ExpertFormat,
    differences,
    drafter_of,
    expected_tensors,
    expert_format_of,
)
from dsv4nb.checkpoint.names import parse_name
from dsv4nb.checkpoint.revision import Detection, detect_contract, detect_encoding
from dsv4nb.contract import Contract
from dsv4nb.errors import DamagedCheckpoint

TOKENIZER = "tokenizer.json"

_QUANT_LABELS: Mapping[ExpertFormat, str] = {
    "fp4": "FP4 experts, FP8 projections",
    "nvfp4": "NVFP4 experts, FP8 projections",
    "fp8": "FP8",
    "bf16": "BF16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk that is complete and of this model.

    Attributes:
        path: absolute folder.
        name: for people.
        provenance: where the files come from.
        encoding: chat encoding, and how sure that is.
        contract, contract_reason: roundings of the arithmetic, and why these.
        drafter: which `mtp.*` blocks there are.
        expert_format: of the trunk's routed experts; see `expected_tensors` for the drafter's.
        entries: every tensor, by official name.
        file_bytes: size of the weight files.
        tokenizer_path: None when there is no tokenizer.json and it was not required.
    """

    path: Path
    name: str
    provenance: str
    config: ModelConfig
    encoding: Detection
    contract: Contract
    contract_reason: str
    drafter: Drafter
    expert_format: ExpertFormat
    entries: Mapping[str, TensorEntry]
    file_bytes: int
    tokenizer_path: Path | None

    @property
    def n_tensors(self) -> int:
        """Tensors on disk, scales included."""
        return len(self.entries)

    @property
    def payload_bytes(self) -> int:
        """Bytes of tensor data, scales included."""
        return sum(e.nbytes for e in self.entries.values())

    @property
    def n_weights(self) -> int:
        """Numbers the network computes with: two per FP4 byte, no scales, no routing tables."""
        return sum(map(_n_weights, self.entries.values()))

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk per weight, scales and tables included."""
        return 8 * self.payload_bytes / self.n_weights

    @property
    def quant_label(self) -> str:
        """Format of the weights, in words."""
        return _QUANT_LABELS[self.expert_format]


def open_checkpoint(path: str | os.PathLike[str], *, require_tokenizer: bool = True) -> Checkpoint:
    """Read what is needed to know a checkpoint and check all of it; no tensor data is read.

    Raises:
        NotACheckpoint: no checkpoint of this model is there.
        UnsupportedModel: it is a V4.1 model.
        DamagedCheckpoint: files or tensors are missing, short or wrong; lists all of them.
        CheckpointError: config.json has a missing, unknown or bad field; `param` names it.
    """
    folder = Path(path).expanduser().absolute()
    raw = read_raw_config(folder)
    config = read_config(folder)
    encoding = detect_encoding(folder, raw)
    found = scan(folder)
    if not found.named:
        raise DamagedCheckpoint(str(folder), found.problems or ["the weight files hold no tensors"])
    drafter = drafter_of(config, found.named)
    expert_format = expert_format_of(config, found.named)
    unreadable = found.named - found.entries.keys()
    problems = list(found.problems)
    problems += differences(expected_tensors(config, drafter, expert_format), found.entries, unreadable)
    tokenizer = folder / TOKENIZER
    has_tokenizer = tokenizer.is_file()
    if require_tokenizer and not has_tokenizer:
        problems.append(f"{TOKENIZER}: missing")
    if problems:
        raise DamagedCheckpoint(str(folder), problems)
    contract, contract_reason = detect_contract(config, found.entries)
    return Checkpoint(
        path=folder,
        name=name_of(folder, raw),
        provenance=provenance_of(folder),
        config=config,
        encoding=encoding,
        contract=contract,
        contract_reason=contract_reason,
        drafter=drafter,
        expert_format=expert_format,
        entries=found.entries,
        file_bytes=found.file_bytes,
        tokenizer_path=tokenizer if has_tokenizer else None,
    )


def _n_weights(entry: TensorEntry) -> int:
    name = parse_name(entry.name)
    if name.leaf in ("scale", "weight_scale", "weight_scale_2", "input_scale", "tid2eid"):
        return 0
    is_packed = name.expert is not None and entry.dtype in ("I8", "U8")
    return prod(entry.shape) * (2 if is_packed else 1)
