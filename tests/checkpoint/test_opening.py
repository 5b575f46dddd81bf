from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dsv4nb
from dsv4nb.checkpoint.config import from_hf
from dsv4nb.checkpoint.headers import INDEX
from dsv4nb.checkpoint.inventory import expected_tensors
from dsv4nb.checkpoint.names import parse_name
from dsv4nb.checkpoint.opening import open_checkpoint
from dsv4nb.errors import CheckpointError, DamagedCheckpoint, NotACheckpoint, UnsupportedModel

Tiny = Callable[..., Path]


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_configs(folder: Path, **fields: object) -> None:
    for name in ("config.json", "inference/config.json"):
        edit(folder / name, lambda c: c.update(fields))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def truncate(path: Path, n_bytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - n_bytes)


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize("drafter", ["none", "nextn", "dspark"])
@pytest.mark.parametrize("fmt", ["fp8fp4", "bf16", "nvfp4", "fp8"])
def test_every_variant_opens(drafter: str, fmt: str, tiny: Tiny) -> None:
    folder = tiny(drafter, fmt)
    opened = open_checkpoint(folder)
    assert opened.drafter == drafter
    assert opened.expert_format == {"fp8fp4": "fp4"}.get(fmt, fmt)
    assert opened.n_tensors == len(json.loads((folder / INDEX).read_text())["weight_map"])
    assert opened.payload_bytes == json.loads((folder / INDEX).read_text())["metadata"]["total_size"]
    assert opened.file_bytes == sum(s.stat().st_size for s in shards(folder))
    assert opened.tokenizer_path == folder / "tokenizer.json"
    assert opened.path == folder
    assert opened.name == "tiny"
    assert opened.provenance == f"local folder {folder}"


def test_the_facts_of_the_load_card(tiny: Tiny) -> None:
    quantised = open_checkpoint(tiny("dspark", "fp8fp4", name="a"))
    plain = open_checkpoint(tiny("dspark", "bf16", name="b"))
    assert quantised.n_weights == plain.n_weights
    # hyper-connections are float32 and the routing tables are counted as overhead
    assert 16 < plain.bits_per_weight < 17
    assert 4 < quantised.bits_per_weight < 8
    assert (quantised.quant_label, plain.quant_label) == ("FP4 experts, FP8 projections", "BF16")
    assert quantised.encoding.revision == "v0731"


def test_is_frozen(tiny: Tiny) -> None:
    opened = open_checkpoint(tiny())
    with pytest.raises(dataclasses.FrozenInstanceError):
        opened.name = "other"  # type: ignore[misc]


def test_a_relative_path_becomes_absolute(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny()
    monkeypatch.chdir(folder.parent)
    opened = open_checkpoint(folder.name)
    assert opened.path == folder
    assert opened.entries["embed.weight"].file.is_absolute()


def test_a_full_size_release_opens_from_its_headers_alone(tmp_path: Path, releases: dict[str, dict[str, Any]]) -> None:
    raw = releases["0731"]
    expected = expected_tensors(from_hf(raw), "dspark", "fp4")
    by_shard: dict[str, dict[str, Any]] = {}
    for name, spec in expected.items():
        place = parse_name(name)
        stem = name.partition(".")[0] if place.layer is None else f"{place.stack}-{place.layer}"
        header = by_shard.setdefault(f"{stem}.safetensors", {})
        begin = max((t["data_offsets"][1] for t in list(header.values())[-1:]), default=0)
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [begin, begin + spec.nbytes]}
    for file, header in by_shard.items():
        text = json.dumps(header).encode()
        with (tmp_path / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            # sparse: no byte of data exists
            out.truncate(8 + len(text) + list(header.values())[-1]["data_offsets"][1])
    weight_map = {name: file for file, header in by_shard.items() for name in header}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    opened = open_checkpoint(tmp_path, require_tokenizer=False)
    assert (opened.n_tensors, opened.payload_bytes) == (72_317, 166_878_536_440)
    assert 284e9 < opened.n_weights < 305e9
    assert round(opened.bits_per_weight, 2) == 4.39
    assert opened.tokenizer_path is None


class TestRefusals:
    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(NotACheckpoint, match="there is no folder"):
            open_checkpoint(tmp_path / "absent")

    def test_no_config(self, tiny: Tiny) -> None:
        folder = tiny()
        (folder / "config.json").unlink()
        with pytest.raises(NotACheckpoint, match=r"has no config\.json; give the folder"):
            open_checkpoint(folder)

    def test_broken_config(self, tiny: Tiny) -> None:
        folder = tiny()
        (folder / "config.json").write_text("{")
        with pytest.raises(DamagedCheckpoint, match=r"config\.json: .*\n.*Fetch"):
            open_checkpoint(folder)

    def test_another_model(self, tiny: Tiny) -> None:
        folder = tiny()
        edit(folder / "config.json", lambda c: c.update(model_type="llama"))
        with pytest.raises(NotACheckpoint, match="model_type 'llama'; this version runs 'deepseek_v4' only"):
            open_checkpoint(folder)

    def test_v41(self, tiny: Tiny) -> None:
        folder = tiny()
        edit(folder / "config.json", lambda c: c.update(model_type="deepseek_v41"))
        with pytest.raises(UnsupportedModel, match=r"V4\.1"):
            open_checkpoint(folder)

    def test_no_weights(self, tiny: Tiny) -> None:
        folder = tiny()
        for path in [*shards(folder), folder / INDEX]:
            path.unlink()
        with pytest.raises(NotACheckpoint, match="give the folder with the downloaded weights"):
            open_checkpoint(folder)

    def test_a_single_file_that_is_none(self, tiny: Tiny) -> None:
        folder = tiny()
        (folder / INDEX).unlink()
        (folder / "model.safetensors").write_bytes(b"")
        with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors: has 0 bytes"):
            open_checkpoint(folder)

    def test_no_tokenizer(self, tiny: Tiny) -> None:
        folder = tiny()
        (folder / "tokenizer.json").unlink()
        with pytest.raises(DamagedCheckpoint, match=r"tokenizer\.json: missing"):
            open_checkpoint(folder)
        assert open_checkpoint(folder, require_tokenizer=False).tokenizer_path is None

    def test_a_partial_census(self, tiny: Tiny) -> None:
        folder = tiny()
        edit(folder / "config.json", lambda c: c.pop("dspark_markov_rank"))
        with pytest.raises(CheckpointError, match="refusing to guess"):
            open_checkpoint(folder)

    def test_a_config_of_another_release(self, tiny: Tiny) -> None:
        folder, other = tiny("dspark"), tiny("nextn", name="other")
        for name in ("config.json", "inference/config.json"):
            (folder / name).write_text((other / name).read_text())
        with pytest.raises(CheckpointError, match="of different releases"):
            open_checkpoint(folder)

    def test_a_config_of_another_size_lists_what_differs(self, tiny: Tiny) -> None:
        folder = tiny()
        edit_configs(folder, n_routed_experts=9)
        with pytest.raises(DamagedCheckpoint) as caught:
            open_checkpoint(folder)
        said = caught.value.problems
        assert "layers.3.ffn.experts.8.w1.weight: missing, expected I8 [128, 128]" in said
        assert any(p.startswith("layers.3.ffn.gate.bias: expected F32 [9], found F32 [8]") for p in said)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "file 2 deleted": (lambda f: shards(f)[1].unlink(), "model-00002-of-00003.safetensors: missing"),
    "file 3 cut": (lambda f: truncate(shards(f)[-1], 1), "model-00003-of-00003.safetensors: has "),
    "scale not in the index": (
        lambda f: edit(f / INDEX, lambda i: i["weight_map"].pop("layers.1.attn.wq_a.scale")),
        "layers.1.attn.wq_a.scale: is in model-00001-of-00003.safetensors, but the index does not name it",
    ),
    "shape off by one": (
        lambda f: edit_configs(f, dspark_markov_rank=31),
        "mtp.2.markov_head.markov_w1.weight: expected BF16 [512, 31], found BF16 [512, 32]",
    ),
    "dtype changed": (
        lambda f: edit_header(shards(f)[0], lambda h: h["layers.0.attn.wkv.scale"].update(dtype="U8")),
        "layers.0.attn.wkv.scale: expected F8_E8M0 [1, 2], found U8 [1, 2]",
    ),
    "header shape off by one": (
        lambda f: edit_header(shards(f)[0], lambda h: h["layers.0.attn.attn_sink"].update(shape=[5])),
        "model-00001-of-00003.safetensors: layers.0.attn.attn_sink: F32 [5] needs 20 bytes, data_offsets span 16",
    ),
}


class TestDamage:
    @pytest.mark.parametrize("fault", FAULTS)
    def test_each_fault_alone_is_one_error(self, fault: str, tiny: Tiny) -> None:
        folder = tiny()
        damage, line = FAULTS[fault]
        damage(folder)
        with pytest.raises(DamagedCheckpoint) as caught:
            open_checkpoint(folder)
        assert any(p.startswith(line) for p in caught.value.problems), caught.value.problems
        assert len(caught.value.problems) <= 3

    def test_all_faults_together_are_listed_together(self, tiny: Tiny) -> None:
        folder = tiny()
        # a shape in a shard that cannot be read any more is not known
        together = {k: v for k, v in FAULTS.items() if k != "shape off by one"}
        for damage, _ in together.values():
            damage(folder)
        (folder / "tokenizer.json").unlink()
        with pytest.raises(DamagedCheckpoint) as caught:
            open_checkpoint(folder)
        said = str(caught.value)
        assert all(line in said for _, line in together.values()), said
        assert "tokenizer.json: missing" in said
        assert "Nothing was loaded. Fetch the files named above again." in said
        assert len(caught.value.problems) == 6

    def test_a_good_copy_opens_right_afterwards(self, tiny: Tiny) -> None:
        bad, good = tiny(name="bad"), tiny(name="good")
        shards(bad)[0].unlink()
        with pytest.raises(DamagedCheckpoint):
            open_checkpoint(bad)
        assert open_checkpoint(good).n_tensors == 827


def test_opening_needs_no_torch(tiny: Tiny) -> None:
    code = (
        "import sys, pkgutil, importlib, dsv4nb.checkpoint\n"
        "for m in pkgutil.iter_modules(dsv4nb.checkpoint.__path__):\n"
        "    importlib.import_module('dsv4nb.checkpoint.' + m.name)\n"
        "dsv4nb.checkpoint.opening.open_checkpoint(sys.argv[1])\n"
        "assert not {'torch', 'safetensors', 'transformers'} & sys.modules.keys()\n"
    )
    root = Path(dsv4nb.__file__).parents[1]
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(tiny())], cwd=root, check=True, timeout=60)
