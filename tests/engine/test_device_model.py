"""A model that was loaded on a GPU, end to end: chats, forks, saved chats, its card. The kernels are their twins."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import dsv4nb
from dsv4nb import model as assembling
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.errors import CheckpointError, EngineError
from dsv4nb.handle import Model
from dsv4nb.session.archive import ArchiveError
from dsv4nb.testing.twin_kernels import twin_kernels

pytestmark = pytest.mark.twins

ASKED = "What is the capital of France?"


@pytest.fixture(scope="module")
def on_twins() -> Iterator[None]:
    """Let GPU 0 be the CPU."""
    load = DeviceEngine.from_checkpoint

    def from_checkpoint(*args: Any, **options: Any) -> DeviceEngine:
        assert options.pop("device") == ["cuda:0"]
        return load(*args, device="cpu", **options)

    with pytest.MonkeyPatch.context() as patch, twin_kernels():
        patch.setattr(assembling, "require_gpus", lambda ids, placement: ids)
        patch.setattr(DeviceEngine, "from_checkpoint", from_checkpoint)
        yield


@pytest.fixture(scope="module")
def model(on_twins: None) -> Iterator[Model]:
    with dsv4nb.load("toy", devices=0, max_seq=384, warmup=False) as model:
        yield model


def test_it_chats_and_goes_on_from_what_it_has(model: Model) -> None:
    chat = model.chat()
    with dsv4nb.load("toy", devices="cpu", drafter=False, max_seq=384) as other:
        twin = other.chat()
        for text in (ASKED, "What is 47 + 38?"):
            reply = chat.send(text, temperature=0.0, max_new=40)
            assert reply.text == twin.send(text, temperature=0.0, max_new=40).text
    assert reply.done.n_cached > 0
    fork = chat.fork()
    assert fork.send("Hello!", temperature=0.0, max_new=20).text


def test_a_saved_chat_goes_on_where_it_was_and_on_no_cpu(model: Model, tmp_path: Path) -> None:
    chat = model.chat()
    chat.send(ASKED, temperature=0.0, max_new=40)
    chat.save(tmp_path / "chat.dsv4")
    wanted = chat.send("What is 47 + 38?", temperature=0.0, max_new=40)
    model.cache.clear()
    again = model.open_chat(tmp_path / "chat.dsv4").send("What is 47 + 38?", temperature=0.0, max_new=40)
    assert again.text == wanted.text
    with (
        dsv4nb.load("toy", devices="cpu", drafter=False, max_seq=384) as other,
        pytest.raises(ArchiveError, match="arithmetic"),
    ):
        other.open_chat(tmp_path / "chat.dsv4")


def test_sampled_replies_repeat_with_their_seed(model: Model) -> None:
    texts = {model.generate(ASKED, temperature=1.0, seed=seed, max_new=24).text for seed in (5, 5)}
    assert len(texts) == 1


def test_its_card_says_where_and_how_it_runs(model: Model) -> None:
    assert model.info.device == "GPU 0"
    assert model.info.contract.startswith("bf16_full (")
    assert model.info.contract.endswith("in bfloat16 between the roundings)")
    assert model.info.drafter == "DSpark, 5 drafts a round"


@pytest.fixture(scope="module", params=["twins", pytest.param("gpu", marks=pytest.mark.gpu)])
def speculating(request: pytest.FixtureRequest) -> Iterator[Model]:
    if request.param == "twins":
        request.getfixturevalue("on_twins")
    with dsv4nb.load("toy", devices=0, max_seq=384, drafter=True, warmup=False) as model:
        yield model


@pytest.mark.parametrize("options", [{"temperature": 0.0}, *({"temperature": 1.0, "seed": seed} for seed in (1, 2, 3))])
def test_speculation_gives_the_plain_text(speculating: Model, options: dict[str, Any]) -> None:
    plain = speculating.generate(ASKED, max_new=40, spec=False, **options)
    for depth in (None, 3):
        reply = speculating.generate(ASKED, max_new=40, spec_depth=depth, **options)
        assert (reply.ids, reply.text) == (plain.ids, plain.text) and not plain.rounds
        assert sum(played.accepts for played in reply.rounds) > 0


def test_a_chat_that_speculates_forks_and_goes_on_as_a_plain_one(speculating: Model) -> None:
    texts = []
    for spec in (True, False):
        speculating.cache.clear()
        chat = speculating.chat(temperature=0.0, max_new=30, spec=spec)
        replies = [chat.send(ASKED)]
        fork = chat.fork()
        replies += [chat.send("What is 47 + 38?"), fork.send("Hello!"), chat.regenerate()]
        texts.append([reply.text for reply in replies])
        assert replies[1].done.n_cached > 0 and bool(replies[1].rounds) == spec
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("on_twins")
def test_a_broken_drafter_is_named_and_the_model_still_answers(tmp_path: Path) -> None:
    shutil.copytree(Path(dsv4nb.__file__).parent / "toy" / "model", tmp_path / "model")
    name = "mtp.1.attn.kv_norm.weight"
    (shard,) = (file for file in (tmp_path / "model").glob("*.safetensors") if name in load_file(file))
    tensors = load_file(shard)
    tensors[name][5] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    with dsv4nb.load(tmp_path / "model", devices=0, max_seq=384, warmup=False) as broken:
        assert broken.info.drafter == f"none: the drafter of the checkpoint cannot run: {name} is not finite"
        reply = broken.generate(ASKED, temperature=0.0, max_new=20)
        assert reply.text and not reply.rounds
    with pytest.raises(CheckpointError, match=f"cannot run: {name} is not finite"):
        dsv4nb.load(tmp_path / "model", devices=0, max_seq=384, drafter=True)


@pytest.mark.usefixtures("on_twins")
def test_a_contract_that_the_kernels_do_not_keep_is_refused() -> None:
    with pytest.raises(EngineError, match="'fp32_plain' does not round the inputs of FP8 products"):
        dsv4nb.load("toy", devices=0, max_seq=384, contract="fp32_plain")


def test_it_imports_without_jupyter_and_without_a_gpu() -> None:
    code = (
        "import sys\n"
        "for m in ('IPython', 'ipywidgets', 'anywidget', 'traitlets'): sys.modules[m] = None\n"
        "import dsv4nb.engine.device\nprint('ok')"
    )
    root = Path(dsv4nb.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{root}:{root / 'kernels'}", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stdout.strip() == "ok"
