"""`load` and the handle, on a tiny random checkpoint and on the bundled model."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dsv4nb
from dsv4nb.encoding.constants import ASSISTANT, BOS, DSML, EOS, THINK_OPEN, USER
from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.errors import (
    CheckpointError,
    DamagedCheckpoint,
    Dsv4Error,
    EngineError,
    ModelClosed,
    NotACheckpoint,
    PromptEmpty,
    PromptTooLong,
    RequestError,
    UnsupportedModel,
)
from dsv4nb.events import Done, PromptUsage, Token
from dsv4nb.model import Model, load
from dsv4nb.testing.tiny_checkpoint import write_tiny_checkpoint
from dsv4nb.testing.tiny_tokenizer import write_tiny_tokenizer

TOY = Path(dsv4nb.__file__).parent / "toy" / "model"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("original") / "tiny", num_hidden_layers=4, **SMALL)
    write_tiny_tokenizer(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.95, "do_sample": true}')
    return folder


# one layer of each kind is enough here
SMALL: dict[str, Any] = {"compress_ratios": [0, 0, 4, 128], "n_routed_experts": 4}


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A checkpoint that the test may damage."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))


@pytest.fixture(scope="module")
def model(original: Path) -> Iterator[Model]:
    with load(original) as made:
        yield made


def serving() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("dsv4nb-serve-")}


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_config(folder: Path, **fields: Any) -> None:
    edit(folder / "config.json", **fields)
    shutil.rmtree(folder / "inference")


def change_tensor(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    save_file(tensors | {"embed.weight": change(tensors["embed.weight"])}, shard)


def cut(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


# what is done to the folder, the error, and words that it says
DAMAGES: dict[str, tuple[Callable[[Path], object], type[Dsv4Error], str]] = {
    "no folder": (shutil.rmtree, NotACheckpoint, "there is no folder"),
    "no config": (lambda f: (f / "config.json").unlink(), NotACheckpoint, "no config.json"),
    "broken json": (lambda f: (f / "config.json").write_text("{"), DamagedCheckpoint, "config.json"),
    "foreign model": (lambda f: edit_config(f, model_type="llama"), NotACheckpoint, "llama"),
    "successor": (lambda f: edit_config(f, model_type="deepseek_v41"), UnsupportedModel, "V4.1"),
    "unknown field": (lambda f: edit_config(f, new_gate="x"), CheckpointError, "new_gate"),
    "missing shard": (
        lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
        DamagedCheckpoint,
        "model-00002-of-00002.safetensors",
    ),
    "truncated file": (cut, DamagedCheckpoint, "model-00002-of-00002.safetensors"),
    "wrong shape": (lambda f: change_tensor(f, lambda t: t[:-1].clone()), DamagedCheckpoint, "embed.weight"),
    "wrong dtype": (lambda f: change_tensor(f, lambda t: t.to(torch.float16)), DamagedCheckpoint, "embed.weight"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), DamagedCheckpoint, "tokenizer.json: missing"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), CheckpointError, "not a readable"),
    "other end id": (lambda f: edit_config(f, eos_token_id=5), CheckpointError, "eos_token_id"),
    "broken sampler values": (
        lambda f: (f / "generation_config.json").write_text('{"top_p": 7}'),
        DamagedCheckpoint,
        "generation_config.json: top_p is 7",
    ),
    "broken generation config": (
        lambda f: (f / "generation_config.json").write_text("["),
        DamagedCheckpoint,
        "generation_config.json",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_m02_a_bad_checkpoint_is_refused_by_name_and_nothing_is_loaded(folder: Path, model: Model, name: str) -> None:
    damage, error, says = DAMAGES[name]
    damage(folder)
    before = serving()
    with pytest.raises(error) as refused:
        load(folder)
    assert type(refused.value) is error
    assert says in str(refused.value)
    assert serving() == before
    assert len(model.generate("hi", max_new=1).ids) <= 1


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"max_sec": 256}, "max_sec", "did you mean 'max_seq'"),
        ({"devices": "cuda:0"}, "devices", "must be 'cpu', or GPU ids"),
        ({"devices": ["cpu", "cpu"]}, "devices", "must be 'cpu', or GPU ids"),
        ({"max_seq": 97}, "max_seq", "from 98 to"),
        ({"max_seq": 2**40}, "max_seq", "declares"),
        ({"max_seq": "256"}, "max_seq", "integer"),
        ({"contract": "fp32_plane"}, "contract", "did you mean 'fp32_plain'"),
        ({"encoding": "v1"}, "encoding", "preview, v0731"),
        ({"prefill": "quick"}, "prefill", "it must be one of fast, exact"),
        ({"prefill": "fast"}, "prefill", "on a CPU there is 'exact' alone"),
        ({"prefill_rows": 64}, "prefill_rows", "prefill='exact' has no chunks"),
    ],
    ids=str,
)
def test_a_bad_option_is_refused_by_name(original: Path, options: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        load(original, **options)
    assert refused.value.param == param


def test_a_contract_that_the_engine_cannot_run_is_refused(original: Path) -> None:
    before = serving()
    with pytest.raises(EngineError, match="bf16_full"):
        load(original, contract="bf16_full")
    assert serving() == before


@pytest.mark.parametrize(
    ("prompt", "error"),
    [("", PromptEmpty), ("word " * 2000, PromptTooLong)],
    ids=["empty", "long"],
)
def test_a_bad_prompt_is_refused_and_the_next_call_works(model: Model, prompt: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        model.generate(prompt)
    assert model.generate("hi", max_new=2).done.n_prompt == len(model.tokenize("hi"))


def test_m61_h30_a_reply_is_the_same_through_every_door(model: Model) -> None:
    options: dict[str, Any] = {"max_new": 8, "seed": 5, "temperature": 1.0}
    result = model.generate("hi", **options)
    assert len(result.ids) == 8 and result.stop_reason == "length"
    events = list(model.stream("hi", **options))
    assert isinstance(events[0], PromptUsage) and isinstance(events[-1], Done)
    assert tuple(event.id for event in events if isinstance(event, Token) and event.id is not None) == result.ids
    assert "".join(event.text for event in events if isinstance(event, Token)) == result.raw_text
    assert model.submit("hi", **options).result().ids == result.ids
    assert model.chat(**options).send("hi").ids == result.ids
    assert model.generate(prompt_ids=model.tokenize("hi"), **options).ids == result.ids
    assert model.generate(messages=[{"role": "user", "content": "hi"}], **options).ids == result.ids

    async def awaited() -> tuple[Any, ...]:
        return tuple([event.id async for event in model.astream("hi", **options) if isinstance(event, Token)])

    assert tuple(i for i in asyncio.run(awaited()) if i is not None) == result.ids


def test_greedy_is_any_temperature_up_to_zero(model: Model) -> None:
    zero = model.generate("hi", temperature=0, max_new=8).ids
    assert model.generate("hi", temperature=-1, max_new=8, seed=3).ids == zero


def test_a_cancelled_run_leaves_a_clean_engine(model: Model) -> None:
    cold = model.generate("hello there", temperature=0, max_new=6).ids
    ticket = model.submit("hello there", temperature=0, max_new=500)
    for event in ticket.events():
        if isinstance(event, Token):
            ticket.cancel()
            break
    partial = ticket.result(5.0)
    assert partial.stop_reason == "cancelled" and partial.ids[:6] == cold[: len(partial.ids)]
    assert model.generate("hello there", temperature=0, max_new=6).ids == cold


def test_m09_the_end_token_is_the_tokenizers(folder: Path) -> None:
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    ids = raw["model"]["vocab"]
    ids[EOS], ids[DSML] = ids[DSML], ids[EOS]
    for token in raw["added_tokens"]:
        token["id"] = ids[token["content"]]
    raw["added_tokens"].sort(key=lambda token: token["id"])
    path.write_text(json.dumps(raw), encoding="utf-8")
    edit_config(folder, eos_token_id=ids[EOS])
    with load(folder) as moved:
        assert moved.eos == ids[EOS] and moved.prepare("hi").eos == {ids[EOS]}


# tells what a request says and leaves in its cache; ends with a run under way
FRESH_PROCESS = """
import sys
from dsv4nb.model import load

model, states = load(sys.argv[1]), []
release = model.engine.release
model.engine.release = lambda state: states.append(state.digest()) or release(state)
print(*model.generate(sys.argv[2], temperature=1.0, seed=4, max_new=8).ids, states[-1])
next(model.submit("hello", max_new=3000).events())
"""


def test_m20_m21_a_request_leaves_nothing_to_the_next_and_a_process_ends_well(
    original: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []
    release = model.engine.release
    monkeypatch.setattr(model.engine, "release", lambda state: states.append(state.digest()) or release(state))

    def said(prompt: str) -> str:
        reply = model.generate(prompt, temperature=1.0, seed=4, max_new=8)
        return f"{' '.join(map(str, reply.ids))} {states[-1]}\n"

    a, b, again = said("one two three"), said("something else, and longer"), said("one two three")
    assert a == again != b
    command = [sys.executable, "-c", FRESH_PROCESS, str(original), "something else, and longer"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b, "")


def test_the_checkpoints_own_sampler_values_are_the_defaults(model: Model) -> None:
    config = model.generate("hi", max_new=1).done.config
    assert (config.temperature, config.top_p) == (0.6, 0.95)


def test_what_is_tokenized_is_what_is_run(model: Model) -> None:
    options: dict[str, Any] = {"system": "Be brief.", "thinking": True}
    ids = model.tokenize("hi", **options)
    assert model.generate("hi", max_new=1, **options).all_ids[: len(ids)] == tuple(ids)
    assert model.render("hi", **options) == f"{BOS}Be brief.{USER}hi{ASSISTANT}{THINK_OPEN}"


def test_m10_the_load_card_says_what_was_found_and_why(model: Model) -> None:
    facts = dict(model.info.rows())
    assert facts["model"] == model.name and facts["layers"].startswith("4: 2 window only, 1 compressed 4:1")
    assert facts["encoding"] == "preview (config.json has no dspark_* keys)"
    assert facts["contract"].startswith("ref_fp8_round (no dspark_* keys")
    assert facts["defaults"] == "temperature 0.6, top_p 0.95 (generation_config.json)"
    assert facts["max_seq"].startswith("4,096 of ")
    assert facts["device"] == "CPU, 1 thread"
    assert facts["prompts"] == "exact"
    assert facts["drafter"] == "none: the checkpoint has no drafter"
    assert all(f"{label:<12}{value}" in str(model.info) for label, value in facts.items())
    assert model.info._repr_html_().count("<tr>") == len(facts)
    assert repr(model) == f"<Model {model.name}>" and "<table>" in model._repr_html_()


def test_a_name_cannot_write_markup(original: Path) -> None:
    with load(original, name="<b>x</b>") as named:
        assert "<b>" not in named.info._repr_html_()
        assert "&lt;b&gt;x" in named.info._repr_html_()


def test_an_encoding_that_nothing_is_sure_of_says_so(folder: Path) -> None:
    (folder / "encoding").mkdir()
    (folder / "encoding" / "encoding_dsv4.py").write_text("pass")
    with load(folder) as guessed:
        assert "uncertain, pass encoding='preview' or" in dict(guessed.info.rows())["encoding"]


class TestSharing:
    def test_m12_the_same_path_and_options_share_an_engine(self, original: Path, model: Model) -> None:
        with load(str(original)) as other:
            assert other.engine is model.engine and other is not model
        assert other.is_closed and not model.is_closed
        assert model.generate("hi", max_new=1)

    def test_m12_other_options_do_not(self, original: Path, model: Model) -> None:
        with load(original, max_seq=256, contract="fp32_plain", encoding="v0731", name="other") as other:
            assert other.engine is not model.engine
            assert other.engine.max_seq == 256 and other.limits.max_seq == 256
            assert dict(other.info.rows())["encoding"] == "v0731 (asked for)"
            assert dict(other.info.rows())["contract"] == "fp32_plain (asked for; published with ref_fp8_round)"
            assert "dsv4nb-serve-other" in serving()
        assert "dsv4nb-serve-other" not in serving()

    def test_files_that_changed_are_read_again(self, folder: Path) -> None:
        with load(folder) as before:
            (folder / "generation_config.json").write_text('{"temperature": 0.25}')
            with load(folder) as after:
                assert after.engine is not before.engine
                assert after.limits.sampler.temperature == 0.25

    def test_the_last_handle_frees_the_engine(self, folder: Path) -> None:
        first, second = load(folder, name="shared"), load(folder, name="shared")
        first.close()
        first.close()
        assert "dsv4nb-serve-shared" in serving()
        assert second.generate("hi", max_new=1)
        second.close()
        assert "dsv4nb-serve-shared" not in serving()
        with pytest.raises(ModelClosed, match="shared"):
            second.generate("hi")
        with pytest.raises(EngineError, match="closed"):
            second.engine.prefill(second.engine.new_state(), [5])

    def test_a_forgotten_handle_is_closed(self, folder: Path) -> None:
        handle = load(folder, name="forgotten")
        chat = handle.chat()
        del handle
        gc.collect()
        assert chat.send("hi", max_new=1)  # a chat keeps its model
        del chat
        deadline = time.monotonic() + 5
        while "dsv4nb-serve-forgotten" in serving():
            assert time.monotonic() < deadline
            gc.collect()


def test_importing_is_quick_and_brings_neither_torch_nor_widgets() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import dsv4nb; s = time.perf_counter() - t;"
        "brought = {'torch', 'ipywidgets', 'anywidget', 'IPython', 'numpy'} & set(sys.modules);"
        "import dsv4nb.model;"
        "later = {'ipywidgets', 'anywidget', 'IPython', 'transformers', 'torch'} & set(sys.modules);"
        "print(s, sorted(brought), sorted(later))"
    )
    tries = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    said = [done.stdout.split(maxsplit=1) for done in tries]
    assert {rest.strip() for _, rest in said} == {"[] []"}
    assert min(float(seconds) for seconds, _ in said) < 0.3


@pytest.fixture(scope="module")
def toy() -> Iterator[Model]:
    with load("toy") as made:
        yield made


@pytest.mark.skipif(not (TOY / "config.json").is_file(), reason="the bundled model is not built")
class TestToy:
    def test_it_answers(self, toy: Model) -> None:
        result = toy.generate("What is the capital of France?", temperature=0)
        assert "Paris" in result.text and result.stop_reason == "stop"

    def test_it_thinks(self, toy: Model) -> None:
        result = toy.generate("What is 47 + 38?", thinking=True, temperature=0)
        assert result.reasoning and "85" in result.text

    def test_it_converses(self, toy: Model) -> None:
        chat = toy.chat(temperature=0)
        chat.send("The code word is silver otter.")
        assert "silver otter" in chat.send("What is the code word?").text

    def test_its_card_says_where_it_is_from(self, toy: Model) -> None:
        assert toy.name == "toy"
        assert dict(toy.info.rows())["from"] == "bundled with dsv4nb"

    def test_loading_and_answering_bring_no_transformers(self) -> None:
        code = (
            "import sys, dsv4nb; m = dsv4nb.load('toy'); c = m.chat(temperature=0); c.send('Hi', max_new=2);"
            "print({'transformers', 'ipywidgets', 'anywidget'} & set(sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "set()"


def test_m11_capabilities_come_from_the_encoding_and_nothing_is_invented(original: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(original, tmp_path / "silent")
    (folder / "generation_config.json").unlink()
    with load(folder) as model:
        caps = model.caps
        assert caps.chat and caps.tools and caps.thinking and caps.instruct_type == "deepseek"
        assert caps.n_vocab == ChatTokenizer.from_file(original / "tokenizer.json").vocab_size
        assert caps.context_length == model.max_seq and caps.max_prompt == model.max_seq - 97
        assert (caps.temperature, caps.top_p) == (None, None)
        assert "recommended nothing" in " ".join(str(caps).split())
        assert caps._repr_html_().count("<tr>") == len(caps.rows())
        with pytest.raises(PromptTooLong):
            model.prepare(prompt_ids=[1] * (caps.max_prompt + 1))
        assert model.prepare(prompt_ids=[1] * caps.max_prompt).max_new == 1
    with load("toy") as toy:
        assert toy.caps.temperature == 0.0 and toy.caps.efforts == ("low", "high", "max")
        assert toy.eos == ChatTokenizer.from_file(f"{toy.info.path}/tokenizer.json").eos_id
