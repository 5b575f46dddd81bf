"""`transformers` as a peer: what is refused, what is compared, and the numbers of both on one shape."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dsv4nb.bench import peer, peer_model
from dsv4nb.bench.asked import Asked
from dsv4nb.bench.commands import main
from dsv4nb.bench.peer import Agreement, Arm
from dsv4nb.bench.peer_model import FORMS, Loaded, loaded
from dsv4nb.bench.spread import Times
from dsv4nb.checkpoint.config import from_hf
from dsv4nb.checkpoint.synthetic import hf_config
from dsv4nb.contract import FP32_PLAIN
from dsv4nb.reference.network import Network
from dsv4nb.weights.synthetic import SyntheticReader

pytestmark = pytest.mark.twins

SMALL: dict[str, Any] = {
    "compress_ratios": [0, 4, 128],
    "num_hash_layers": 1,
    "index_n_heads": 4,
    "index_topk": 32,
    "o_lora_rank": 64,
    "q_lora_rank": 256,
    "sliding_window": 32,
}
ASKED = Asked(shape="tiny", layers=3, experts=12, changes=SMALL)
COMMAND = [
    *("peer", "--synthetic", "tiny", "--layers", "3", "--experts", "12", "--context", "40"),
    *(text for name, value in SMALL.items() for text in ("--set", f"{name}={json.dumps(value)}")),
]
CPU = (torch.device("cpu"),)


class Model:
    """Answers as a model of `transformers`, with logits that rise with the positions that it has seen."""

    def __init__(self, vocab: int, *fails: str) -> None:
        self.vocab, self.fails, self.form = vocab, fails, ""
        self.seen: list[tuple[str, int, int]] = []

    def set_experts_implementation(self, form: str) -> None:
        self.form = form

    def __call__(
        self,
        input_ids: torch.Tensor,
        use_cache: bool,
        past_key_values: int | None = None,
        logits_to_keep: int = 0,
    ) -> SimpleNamespace:
        if self.form in self.fails:
            raise RuntimeError("no kernel for this\nand more lines")
        pos = past_key_values or 0
        self.seen.append((self.form, pos, input_ids.shape[1]))
        rows = torch.arange(input_ids.numel() * self.vocab, dtype=torch.float32).view(1, -1, self.vocab)
        return SimpleNamespace(logits=rows[:, -logits_to_keep:], past_key_values=pos + input_ids.shape[1])


def test_a_form_that_fails_costs_no_other_one_its_run_and_all_walk_alike(
    twins: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(512, FORMS[1])
    found = Loaded(model=model, version="9.9", stored="bf16", why="they need a GPU", nbytes=3_000_000_000)
    monkeypatch.setattr(peer, "require_transformers", lambda: None)
    monkeypatch.setattr(peer, "loaded", lambda asked, devices, compiles: found)
    monkeypatch.setattr(peer, "TURNS", 2)
    file = tmp_path / "told.json"
    assert main([*COMMAND, "--json", str(file)]) == 0
    text, told = capsys.readouterr().out, json.loads(file.read_text())
    assert [(arm["context"], arm["name"]) for arm in told["arms"]] == [
        (40, "dsv4nb"), (40, "transformers, batched_mm"), (40, "transformers, grouped_mm"),
    ]  # fmt: skip
    ours, theirs, failed = told["arms"]
    assert ours["ms"]["samples"] == theirs["ms"]["samples"] == 2 * peer.AT_ONCE
    assert failed["ms"] is None and "failed: RuntimeError: no kernel for this\n" in text
    assert ours["by_ours"] == 1 and theirs["by_ours"] == theirs["ms"]["median"] / ours["ms"]["median"]
    assert theirs["ms_per_layer"] == theirs["ms"]["median"] / 3
    assert told["least"] == {"40": theirs["by_ours"]} and f"at 40       {theirs['by_ours']:.1f} x" in text
    assert "transformers 9.9, bfloat16, the exact values: no kernels for FP8, they need a GPU; 3.00 GB" in text
    walked = [(pos, rows) for form, pos, rows in model.seen if form == FORMS[0]]
    assert walked[:2] == [(0, 1), (0, 40)]  # the first to find out whether it runs
    assert walked[2 : 2 + 3 * peer.AT_ONCE] == [(40 + i, 1) for i in range(3 * peer.AT_ONCE)]
    assert model.seen[-1][1:] == (peer.COMPARED - 1, 1) and told["agreement"]["rows"] == peer.COMPARED


def test_a_peer_that_does_not_run_at_all_leaves_the_times_of_this_engine(
    twins: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Loaded(model=Model(512, *FORMS), version="9.9", stored="fp8fp4", why="", nbytes=1)
    monkeypatch.setattr(peer, "require_transformers", lambda: None)
    monkeypatch.setattr(peer, "loaded", lambda asked, devices, compiles: found)
    assert main([*COMMAND, "--compile"]) == 0
    text = capsys.readouterr().out
    assert "its hyper connections compiled" in text and text.count("failed: RuntimeError: no kernel for this") == 2
    assert "transformers 9.9, FP8 and FP4 codes" in text and "logits      not compared" in text and "x this" not in text


def test_what_agrees() -> None:
    rows = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    same = Agreement.of(rows, rows)
    assert same.correlation == pytest.approx(1) and same.median_gap == 0 and (same.rows, same.same_best) == (5, 5)
    other = np.array(rows)
    other[2] = -other[2]
    apart = Agreement.of(rows, other)
    assert apart.same_best == 4 and apart.correlation < 0.8
    assert Agreement.of(rows, rows + rows.std()).median_gap == pytest.approx(1)


def test_a_line_of_the_table() -> None:
    ms = Times.of([2.0, 2.0, 4.0])
    arm = Arm(context=7, name="transformers, batched_mm", ms=ms, ms_per_layer=0.5, by_ours=12.345)
    assert str(arm).split() == ["7", "transformers,", "batched_mm", "3", "2.000", "4.000", "0.5000", "12.35"]


def test_a_machine_without_transformers_is_told_so_before_anything_is_made(
    twins: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(COMMAND) == 1
    said = capsys.readouterr()
    assert "pip install transformers accelerate" in said.err and len(said.err.splitlines()) == 1 and not said.out
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.57.1"))
    assert main(COMMAND) == 1
    assert "transformers 4.57.1 has no DeepseekV4ForCausalLM; 5.17 has one" in capsys.readouterr().err


@pytest.fixture
def transformers() -> Any:
    found = pytest.importorskip("transformers")
    if not hasattr(found, peer_model.MODEL):
        pytest.skip(f"transformers {found.__version__} has no {peer_model.MODEL}")
    return found


@pytest.mark.parametrize("stored", ["bf16", "fp8fp4"])
@torch.inference_mode()
def test_both_have_the_same_numbers(transformers: Any, monkeypatch: pytest.MonkeyPatch, stored: str) -> None:
    ids = torch.randint(0, 512, (1, 120), generator=torch.Generator().manual_seed(0))
    raw = hf_config("tiny", ASKED.all_changes, fmt="bf16")
    reader = SyntheticReader(from_hf(raw))
    network = Network(reader.config, FP32_PLAIN)
    network.load_official({name: reader.read(name) for name in reader.entries})
    ours = network(ids)[0]
    if stored == "fp8fp4":  # without a GPU it makes bfloat16 of the codes while it loads
        monkeypatch.setattr(peer_model, "missing_kernels", lambda device: "")
    found = loaded(ASKED, CPU, torch.float32 if stored == "bf16" else torch.bfloat16)
    assert found.stored == stored
    for form in found.forms():
        theirs = found.model(input_ids=ids, use_cache=False).logits[0].float()
        if stored == "bf16":
            assert float((theirs - ours).abs().max()) < 1e-4 * float(ours.abs().max()), form
        else:
            assert Agreement.of(ours.numpy(), theirs.numpy()).correlation > 0.98, form


def test_the_command(
    transformers: Any, twins: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peer, "TURNS", 2)
    assert main([*COMMAND, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [arm["name"] for arm in told["arms"]] == ["dsv4nb", *(f"transformers, {form}" for form in FORMS)]
    assert all(arm["ms"]["samples"] == 2 * peer.AT_ONCE for arm in told["arms"])
    assert told["version"] == transformers.__version__ and told["their_bytes"] > 10**7
    assert told["agreement"]["correlation"] > 0.95  # activations are rounded here, and not there


def test_hyper_connections_are_compiled_where_that_is_asked_for(
    transformers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(type(self).__name__))
    loaded(ASKED, CPU)
    assert compiled == []
    loaded(ASKED, CPU, compiles=True)
    assert compiled == [peer_model.HYPER] * 2 * 3


@pytest.mark.gpu
def test_transformers_takes_ten_times_as_long_on_a_gpu(transformers: Any) -> None:
    report = peer.peer(Asked(shape="flash", layers=4, experts=32, changes={"num_hash_layers": 1}, widths=(1,)))
    assert report.agreement is not None and report.agreement.correlation > 0.9
    assert report.least[1024] > 10
