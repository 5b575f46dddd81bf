"""Tensors of made-up checkpoints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4nb.checkpoint.config import from_hf
from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.checkpoint.synthetic import EXPERT_FORMATS, Format, hf_config
from dsv4nb.engine.cpu import CpuEngine
from dsv4nb.model import load
from dsv4nb.weights.packing import E8M0_NAN, unpack_fp4, unpack_fp8, unpack_nvfp4
from dsv4nb.weights.reader import Reader, TensorSource
from dsv4nb.weights.synthetic import SyntheticReader, main, write_synthetic

FLASH = SyntheticReader(from_hf(hf_config("flash-0731")))
SMALL = {"num_hidden_layers": 4, "n_routed_experts": 3}


def reader(fmt: Format = "fp8fp4", seed: int = 0, **changes: Any) -> SyntheticReader:
    config = from_hf(hf_config("tiny-0731", SMALL | changes, fmt=fmt))
    return SyntheticReader(config, expert_format=EXPERT_FORMATS[fmt], seed=seed)


def raw(value: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return value.reshape(-1).view(torch.uint8)


def decoded(source: SyntheticReader, name: str) -> Tensor:
    """The numbers of a weight."""
    module, value = name.removesuffix(".weight"), source.read(name)
    if f"{module}.weight_scale" in source:
        return unpack_nvfp4(value, source.read(f"{module}.weight_scale"), source.read(f"{module}.weight_scale_2"))
    if f"{module}.scale" not in source:
        return value.float()
    return (unpack_fp4 if value.dtype == torch.int8 else unpack_fp8)(value, source.read(f"{module}.scale"))


def test_has_the_census_of_the_release() -> None:
    assert len(FLASH.entries) == 72_317
    assert sum(spec.nbytes for spec in FLASH.entries.values()) == 166_878_536_440


@pytest.mark.parametrize(
    "name",
    [
        "layers.7.ffn.experts.3.w1.weight",
        "layers.7.ffn.experts.3.w2.scale",
        "layers.41.attn.wkv.weight",
        "layers.5.hc_attn_fn",
        "mtp.2.hc_head_scale",
    ],
)
def test_makes_one_tensor_of_the_release_without_the_others(name: str) -> None:
    before, value = FLASH.bytes_read, FLASH.read(name)
    spec = FLASH.entries[name]
    assert value.shape == spec.shape and value.nbytes == FLASH.bytes_read - before == spec.nbytes
    assert (name in FLASH, FLASH.dtype(name)) == (True, spec.dtype)


def test_a_tensor_depends_on_its_seed_name_and_shape_alone() -> None:
    one, same, other, larger = reader(), reader(), reader(seed=1), reader(n_routed_experts=5, num_hidden_layers=6)
    names = [n for n in one.entries if n.startswith(("layers.1.attn.", "layers.3.ffn.experts.2."))]
    assert len(names) == 13 + 6
    for name in reversed(names):
        assert torch.equal(raw(one.read(name)), raw(same.read(name))), name
        assert torch.equal(raw(one.read(name)), raw(larger.read(name))), name
        if not name.endswith(".scale"):  # a scale of one tile is one of two
            assert not torch.equal(raw(one.read(name)), raw(other.read(name))), name
    twins = ("layers.1.attn.wq_a.weight", "layers.2.attn.wq_a.weight")
    assert not torch.equal(*(raw(one.read(name)) for name in twins))


@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_every_format_of_a_seed_holds_the_same_numbers(fmt: Format) -> None:
    plain, packed = reader("bf16"), reader(fmt)
    for name in plain.entries:
        if name.endswith(".weight"):
            assert torch.equal(decoded(packed, name), decoded(plain, name)), name
        else:
            assert torch.equal(packed.read(name), plain.read(name)), name


def test_no_code_or_scale_is_one_that_no_file_has() -> None:
    source = reader()
    for name, spec in source.entries.items():
        value = source.read(name)
        if spec.dtype == "F8_E8M0":
            assert int(value.min()) > 1 and int(value.max()) < 240 < E8M0_NAN, name  # far from where kernels differ
        elif spec.dtype == "I64":
            assert all(len(set(row)) == len(row) for row in value.tolist())
            assert int(value.min()) >= 0 and int(value.max()) < SMALL["n_routed_experts"]
        elif spec.dtype != "I8":
            assert bool(value.float().isfinite().all()), name


def test_all_codes_of_fp4_and_several_scales_occur_and_a_matrix_has_its_deviation() -> None:
    for name, gain, columns in (
        ("layers.3.ffn.experts.0.w1", 1.5, 4096),
        ("layers.3.ffn.experts.0.w2", 0.7, 2048),
        ("layers.4.attn.indexer.wq_b", 1.0, 1024),
    ):
        codes, scale = FLASH.read(f"{name}.weight"), FLASH.read(f"{name}.scale")
        assert 2 <= len(scale.unique()) <= 3
        if codes.dtype == torch.int8:
            counts = torch.bincount(codes.view(torch.uint8).flatten().long(), minlength=256) / codes.numel()
            assert (counts * 256 - 1).abs().max() < 0.05
            rms = unpack_fp4(codes[:256], scale[:256]).square().mean().sqrt()
        else:
            rms = unpack_fp8(codes[:256], scale[:2]).square().mean().sqrt()
        assert float(rms) == pytest.approx(gain * columns**-0.5, rel=0.02)


def test_a_reader_of_the_written_files_reads_what_was_made(tmp_path: Path) -> None:
    for fmt in EXPERT_FORMATS:
        folder = tmp_path / fmt
        made = write_synthetic(folder, hf_config("tiny-0731", SMALL, fmt=fmt), fmt=fmt, seed=3)
        checkpoint = open_checkpoint(folder, require_tokenizer=False)
        assert checkpoint.expert_format == EXPERT_FORMATS[fmt] and checkpoint.drafter == "dspark"
        with Reader(checkpoint.entries) as files, made:
            sources: tuple[TensorSource, TensorSource] = (files, made)
            made.bytes_read = 0
            for name in checkpoint.entries:
                stored, again = (source.read(name) for source in sources)
                assert stored.dtype == again.dtype and stored.shape == again.shape
                assert torch.equal(raw(stored), raw(again)), name
                assert {source.dtype(name) for source in sources} == {checkpoint.entries[name].dtype}
            assert files.bytes_read == made.bytes_read == checkpoint.payload_bytes


def test_activations_stay_moderate_through_as_many_layers_as_the_release_has(tmp_path: Path) -> None:
    small = {"vocab_size": 300, "n_routed_experts": 2, "num_hidden_layers": 43, "index_n_heads": 2, "hidden_size": 128}
    write_synthetic(tmp_path, hf_config("tiny", small))
    engine = CpuEngine.from_checkpoint(open_checkpoint(tmp_path, require_tokenizer=False))
    state = engine.new_state()
    logits = engine.prefill(state, [(37 * i + 11) % 290 + 5 for i in range(140)]).logits
    step = engine.forward_rows(state, [7, 8, 9])
    for row in (logits, *step):
        assert 1.0 < float(np.std(row)) < 4.0 and float(np.abs(row).max()) < 20


class TestCommand:
    SIZES = (
        *("--layers", "3", "--experts", "4", "--set", "hidden_size=256", "--set", "moe_intermediate_size=128"),
        *("--set", "vocab_size=512", "--set", "num_attention_heads=4", "--set", "head_dim=128", "--set", "o_groups=2"),
        *("--set", "o_lora_rank=128", "--set", "q_lora_rank=128", "--set", "index_n_heads=4"),
    )

    def test_writes_a_checkpoint_that_loads_and_runs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = tmp_path / "V4-Flash-0731-small"
        assert main(["flash-0731", "--to", str(folder), *self.SIZES]) == 0
        said = capsys.readouterr().out
        checkpoint = open_checkpoint(folder)
        assert f"{checkpoint.n_tensors:,} tensors, {checkpoint.payload_bytes:,} bytes" in said
        # embed, three layers, the head, three drafter blocks
        assert len(list(folder.glob("model-*-of-00008.safetensors"))) == 8
        assert [checkpoint.config.kind(i) for i in range(3)] == ["swa", "swa", "csa"]
        with load(folder) as model:
            reply = model.generate("Hello", temperature=0.0, max_new=6)
            assert reply.done.route == "spec_greedy" and reply.done.n_tokens > 0

    def test_runs_as_a_module(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "dsv4nb.weights.synthetic", "tiny", "--to", str(tmp_path / "x"), "--seed", "5"]
        subprocess.run(command, check=True, capture_output=True)
        assert open_checkpoint(tmp_path / "x").drafter == "none"

    def test_a_disk_without_room_is_refused_with_the_byte_count_before_anything_is_made(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "none" / "there"
        assert main(["tiny", "--to", str(folder), "--set", f"vocab_size={10**12}"]) == 1
        said = re.search(r"takes ([\d,]+) bytes in 9 files, .* has [\d,]+ free", capsys.readouterr().err)
        assert said is not None
        tensors = SyntheticReader(from_hf(hf_config("tiny", {"vocab_size": 10**12}))).entries.values()
        # and the headers
        assert 0 < int(said[1].replace(",", "")) - sum(spec.nbytes for spec in tensors) < 200 * len(tensors)
        assert not (tmp_path / "none").exists()

    def test_a_folder_with_a_checkpoint_is_left_alone(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert main(["tiny", "--to", str(tmp_path)]) == 1
        assert "holds a checkpoint already; give an empty folder" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--layers", "0"], "num_hidden_layers is 0"),
            (["--set", "hidden=3"], "unknown field hidden"),
            (["--set", "hidden_size=100"], "hidden_size is 100; it must be a multiple of 128"),
        ],
    )
    def test_a_bad_field_is_named(
        self, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["tiny", "--to", str(tmp_path / "x"), *options]) == 1
        assert message in capsys.readouterr().err and not (tmp_path / "x").exists()

    def test_a_change_that_is_none_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for text, message in (("hidden_size", "must have FIELD=VALUE"), ("hidden_size=big", "must have JSON")):
            with pytest.raises(SystemExit):
                main(["tiny", "--to", str(tmp_path), "--set", text])
            assert message in capsys.readouterr().err
