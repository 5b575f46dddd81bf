"""A model that was loaded on a GPU, end to end: chats, forks, saved chats, its card. The kernels are their twins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dsv4nb
from dsv4nb import model as assembling
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.errors import CheckpointError, EngineError
from dsv4nb.handle import Model
from dsv4nb.session.archive import ArchiveError
from dsv4nb.testing.twin_kernels import twin_kernels

ASKED = "What is the capital of France?"


@pytest.fixture(scope="module")
def on_twins() -> Iterator[None]:
    """Let GPU 0 be the CPU."""
    load = DeviceEngine.from_checkpoint

    def from_checkpoint(*args: Any, **options: Any) -> DeviceEngine:
        assert options.pop("device") == "cuda:0"
        return load(*args, device="cpu", **options)

    with pytest.MonkeyPatch.context() as patch, twin_kernels():
        patch.setattr(assembling, "require_one_gpu", lambda ids: ids[0])
        patch.setattr(DeviceEngine, "from_checkpoint", from_checkpoint)
        yield


@pytest.fixture(scope="module")
def model(on_twins: None) -> Iterator[Model]:
    with dsv4nb.load("toy", devices=0, max_seq=384) as model:
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
    assert "the GPU engine does not draft yet; it decodes plainly" in model.info.drafter


@pytest.mark.usefixtures("on_twins")
def test_a_drafter_that_is_asked_for_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match="cannot run: the GPU engine does not draft yet"):
        dsv4nb.load("toy", devices=0, max_seq=384, drafter=True)


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
