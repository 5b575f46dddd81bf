"""Tensors → a checkpoint folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef  # type: ignore[attr-defined]

from dsv4nb.checkpoint.config import from_hf
from dsv4nb.checkpoint.headers import INDEX, ITEM_BYTES, read_entries
from dsv4nb.checkpoint.inventory import Spec
from dsv4nb.checkpoint.synthetic import hf_config, inference_config, official_shard
from dsv4nb.errors import NotACheckpoint, RequestError
from dsv4nb.weights import writing
from dsv4nb.weights.synthetic import SyntheticReader
from dsv4nb.weights.writing import write_folder

RAW = hf_config("tiny", {"num_hidden_layers": 2, "n_routed_experts": 2})


class Watched(SyntheticReader):
    """Tells how much of what it made before is still held by somebody."""

    def __init__(self, fails_at: str = "") -> None:
        super().__init__(from_hf(RAW))
        self.held: list[StorageWeakRef] = []
        self.most, self.fails_at = 0, fails_at

    def read(self, name: str) -> Tensor:
        self.most = max(self.most, sum(not one.expired() for one in self.held))
        if name == self.fails_at:
            raise KeyboardInterrupt
        value = super().read(name)
        self.held.append(StorageWeakRef(value.untyped_storage()))
        return value


def write(folder: Path, source: SyntheticReader, shard_of: Callable[[str], tuple[int, ...]] = official_shard) -> None:
    write_folder(folder, RAW, inference_config(RAW), source, source.entries, shard_of)


def test_other_readers_read_what_is_written(tmp_path: Path) -> None:
    source = SyntheticReader(from_hf(RAW))
    write(tmp_path, source)
    found: dict[str, Tensor] = {}
    for file in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert found.keys() == source.entries.keys()
    for name, value in found.items():
        assert torch.equal(value.reshape(-1).view(torch.uint8), source.read(name).reshape(-1).view(torch.uint8)), name
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in source.entries.values())


def test_files_are_those_of_the_release_and_every_tensor_is_aligned(tmp_path: Path) -> None:
    write(tmp_path, SyntheticReader(from_hf(RAW)))
    entries = read_entries(tmp_path)
    assert {name: entry.file.name for name, entry in entries.items() if "." not in name or name.count(".") == 1} == {
        "embed.weight": "model-00001-of-00004.safetensors",
        **dict.fromkeys(
            ("head.weight", "norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"),
            "model-00004-of-00004.safetensors",
        ),
    }
    assert {e.file.name for n, e in entries.items() if n.startswith("layers.1.")} == {
        "model-00003-of-00004.safetensors"
    }
    assert all(entry.offset % ITEM_BYTES[entry.dtype] == 0 for entry in entries.values())


def test_what_waits_to_be_written_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PENDING_BYTES", 0)
    source = Watched()
    write(tmp_path, source)
    assert len(source.held) == len(source.entries)
    assert source.most <= 2  # one is written, and a thread may not have let go of the one before


def test_a_disk_that_fails_ends_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = writing._write

    def full(path: Path, at: int, data: Tensor) -> None:
        if path.name.startswith("model-00002"):
            raise OSError(28, "No space left on device")
        written(path, at, data)

    monkeypatch.setattr(writing, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, Watched())
    assert not any(thread.name.startswith("dsv4nb-write") for thread in threading.enumerate())
    with pytest.raises(NotACheckpoint):
        read_entries(tmp_path)


def test_what_is_interrupted_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, Watched(fails_at="layers.1.attn.wq_b.weight"))
    with pytest.raises(NotACheckpoint):
        read_entries(tmp_path)


def test_refuses_before_anything_is_written(tmp_path: Path) -> None:
    large = {"embed.weight": Spec("F32", (10**13,))}
    with pytest.raises(RequestError, match=r"takes 40,000,000,000,\d\d\d bytes in 1 files") as refused:
        write_folder(tmp_path / "a" / "b", RAW, {}, SyntheticReader(from_hf(RAW)), large, official_shard)
    assert refused.value.param == "folder" and not list(tmp_path.iterdir())
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(RequestError, match="holds a checkpoint already"):
        write(tmp_path, Watched())
    assert [path.name for path in tmp_path.iterdir()] == [INDEX]
