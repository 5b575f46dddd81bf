"""H-03, H-04, A-24: a model that was loaded on GPUs is ready, and as nobody had used it.

With the kernels' twins, where the CPU stands for one GPU or two, and on GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4nb
from dsv4nb import model as assembling
from dsv4nb.bench.asked import Asked
from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.checkpoint.revision import detect_contract
from dsv4nb.config import SamplerConfig
from dsv4nb.engine import device, gpus, warm_up
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.plain_choice import GREEDY, PlainChoice
from dsv4nb.engine.prefill import FEWEST_ROWS
from dsv4nb.engine.protocol import MAX_ROWS
from dsv4nb.engine.rank_chunk import RankChunk
from dsv4nb.engine.rank_forward import RankForward
from dsv4nb.errors import LoadCancelled, RequestError
from dsv4nb.testing.twin_kernels import twin_kernels
from dsv4nb.weights.progress import LoadStep

twins = pytest.mark.twins

SCRIPT = Path(__file__).with_name("forms.py")
MAX_SEQ = 384
CHUNK = 64
ASKED = "What is the capital of France?"

PLACES = {
    "one": (["cpu"], "tensor"),
    "pair": (["cpu"] * 2, "tensor"),
    "one gpu": (["cuda:0"], "tensor"),
    "pair of gpus": (["cuda:0", "cuda:1"], "tensor"),
    "pipeline of gpus": (["cuda:0", "cuda:1"], "pipeline"),
}
ON_GPUS = [
    pytest.param("one gpu", marks=pytest.mark.gpu),
    pytest.param("pair of gpus", marks=pytest.mark.gpu2),
    pytest.param("pipeline of gpus", marks=pytest.mark.gpu2),
]


@pytest.fixture(autouse=True)
def asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs tests may have left it out everywhere."""
    monkeypatch.delenv("DSV4NB_SKIP_WARMUP", raising=False)


@pytest.fixture(scope="module", params=[*(pytest.param(name, marks=twins) for name in ("one", "pair")), *ON_GPUS])
def engines(request: pytest.FixtureRequest, toy: Checkpoint) -> Iterator[tuple[DeviceEngine, DeviceEngine]]:
    """One engine that ran, and one on the same weights that did not."""
    places, kind = PLACES[request.param]
    is_cpu = places[0] == "cpu"
    with pytest.MonkeyPatch.context() as patch, twin_kernels() if is_cpu else nullcontext():
        if is_cpu:
            patch.setattr(device, "chunk_fault", lambda config, shapes: "")  # twins of a chunk's kernels have no tiles
        options: dict[str, Any] = {"max_seq": MAX_SEQ, "chunk_rows": CHUNK}
        engine = DeviceEngine.from_checkpoint(toy, device=places, placement=kind, **options)  # type: ignore[arg-type]
        fresh = DeviceEngine(engine.ranks, toy.config, toy.contract, links=engine.links, **options)
        warm_up.warm_up(engine)
        yield engine, fresh
        fresh.close()
        engine.close()


def test_h03_every_byte_is_as_in_an_engine_that_never_ran(engines: tuple[DeviceEngine, DeviceEngine]) -> None:
    engine, fresh = engines
    assert engine.blocks_in_use == fresh.blocks_in_use == 0
    assert all(sum(one.used for one in each.classes.values()) == 0 for each in engine.cache_bytes())
    ours, theirs = engine.new_state(), fresh.new_state()
    assert (ours.pos, ours.pending, ours.context) == (theirs.pos, theirs.pending, theirs.context) == (0, 0, 0)
    for one, other in zip(ours.caches.copies, theirs.caches.copies, strict=True):
        for kept, new in zip(one._buffers(), other._buffers(), strict=True):
            assert torch.equal(kept, new) and not kept.any()
    assert ours.digest() == theirs.digest()
    for state in (ours, theirs):
        state.release()


def test_h03_a_sequence_goes_as_in_an_engine_that_never_ran(engines: tuple[DeviceEngine, DeviceEngine]) -> None:
    found = []
    for engine in engines:
        state = engine.new_state()
        logits = engine.prefill(state, [(31 * i) % 200 for i in range(90)]).logits
        drafted = engine.draft(state, int(logits.argmax()), PlainChoice(config=GREEDY, first=91))
        drawn = engine.draw_rows(state, [5, 6, 7], SamplerConfig(temperature=1.0, top_p=0.9, seed=3))
        engine.commit(state, 2)
        found.append((logits.tobytes(), drafted.ids, drawn.ids, state.digest()))
        engine.release(state)
    assert found[0] == found[1]


@pytest.fixture(params=[pytest.param("one", marks=twins)])
def unused(request: pytest.FixtureRequest, toy: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceEngine]:
    monkeypatch.setattr(device, "chunk_fault", lambda config, shapes: "")
    with twin_kernels():
        engine = DeviceEngine.from_checkpoint(toy, device="cpu", max_seq=MAX_SEQ, chunk_rows=CHUNK)
        yield engine
        engine.close()


def test_h04_forwards_of_every_width_and_chunks_are_run(unused: DeviceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, chunks = set[tuple[int, bool]](), list[int]()
    launches, run = RankForward.launches, RankChunk.run

    def noted(self: RankForward, step: Any, caches: Any, *, has_head: bool) -> Any:
        rows.add((step.rows, has_head))
        return launches(self, step, caches, has_head=has_head)

    def noted_run(self: RankChunk, caches: Any, tokens: Any, pos: int, *, has_head: bool) -> Any:
        chunks.append(len(tokens))
        return run(self, caches, tokens, pos, has_head=has_head)

    monkeypatch.setattr(RankForward, "launches", noted)
    monkeypatch.setattr(RankChunk, "run", noted_run)
    warm_up.warm_up(unused)
    assert rows == {(width, has_head) for width in range(1, MAX_ROWS + 1) for has_head in (True, False)}
    others = [FEWEST_ROWS + 1, FEWEST_ROWS + 8]
    assert chunks == [64, 64, *others, 64, *others, CHUNK]  # each shape for its graph, then one behind the other


def test_h03_it_is_stopped_between_two_forwards_and_holds_nothing(unused: DeviceEngine) -> None:
    for most in (0, 5):
        left = [most]

        def step(left: list[int] = left) -> None:
            if not left[0]:
                raise ZeroDivisionError
            left[0] -= 1

        with pytest.raises(ZeroDivisionError):
            warm_up.warm_up(unused, step)
        assert unused.blocks_in_use == 0 and sum(unused._shelf.made.values()) == 1
    state = unused.new_state()
    unused.prefill(state, [1, 2, 3])


@twins
@pytest.mark.parametrize(
    "place", [(1, "tensor"), (2, "tensor"), (2, "pipeline")], ids=lambda place: "-".join(map(str, place))
)
def test_h04_a24_what_requests_launch_was_launched_before(place: tuple[int, str]) -> None:
    """In the forms that a GPU's kernels have, which none runs."""
    root = Path(dsv4nb.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--ranks", str(place[0]), "--placement", place[1]],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        | {"PYTHONPATH": f"{root}:{root / 'kernels'}", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\n0 new\n")


@twins
@pytest.mark.parametrize("max_seq", [98, 160])
def test_h03_a_short_sequence_has_room_for_what_a_chat_needs(toy: Checkpoint, max_seq: int) -> None:
    with twin_kernels():
        engine = DeviceEngine.from_checkpoint(toy, device="cpu", max_seq=max_seq)
        warm_up.warm_up(engine)
        assert engine.blocks_in_use == 0
        engine.close()


# the model that is loaded


@pytest.fixture
def on_twins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let GPU 0 be the CPU, which is warmed up as a GPU is, in three steps."""
    load = DeviceEngine.from_checkpoint

    def from_checkpoint(*args: Any, **options: Any) -> DeviceEngine:
        return load(*args, **options | {"device": "cpu"})

    def in_three(engine: DeviceEngine, on_step: Any) -> None:
        for _ in range(3):
            on_step()

    monkeypatch.setattr(assembling, "require_gpus", lambda ids, placement: ids)
    monkeypatch.setattr(DeviceEngine, "from_checkpoint", from_checkpoint)
    monkeypatch.setattr(warm_up, "is_of_use", lambda engine: True)
    monkeypatch.setattr(warm_up, "warm_up", in_three)
    with twin_kernels():
        yield


def phases(**options: Any) -> list[str]:
    steps: list[LoadStep] = []
    dsv4nb.load("toy", max_seq=MAX_SEQ, progress=steps.append, **{"devices": 0} | options).close()
    return list(dict.fromkeys(step.phase for step in steps))


@pytest.mark.usefixtures("on_twins")
def test_h03_the_last_phase_of_a_load_warms_up_and_can_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ["headers", "weights", "engine"]
    assert phases() == [*plain, "warming"]
    assert phases(warmup=False) == plain
    monkeypatch.setenv("DSV4NB_SKIP_WARMUP", "1")
    assert phases() == plain
    assert phases(warmup=True) == [*plain, "warming"]
    monkeypatch.setenv("DSV4NB_SKIP_WARMUP", "0")
    assert phases() == [*plain, "warming"]


def test_h03_a_cpu_has_nothing_to_warm_up() -> None:
    assert phases(devices="cpu", warmup=True)[-1] == "engine"


def test_h03_what_is_neither_yes_nor_no_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="warmup is 'no'; it must be True or False") as refused:
        dsv4nb.load("toy", warmup="no")  # type: ignore[arg-type]
    assert refused.value.param == "warmup"
    monkeypatch.setenv("DSV4NB_SKIP_WARMUP", "yes")
    with pytest.raises(RequestError, match="DSV4NB_SKIP_WARMUP is 'yes'; it must be 1, or 0") as refused:
        dsv4nb.load("toy")
    assert refused.value.param == "DSV4NB_SKIP_WARMUP"


@pytest.mark.usefixtures("on_twins")
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), LoadCancelled("toy", 1, 1), MemoryError()], ids=lambda e: type(e).__name__
)
def test_h03_stopped_while_it_warms_up_nothing_stays_loaded(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    closed, close = list[int](), DeviceEngine.close

    def noted(self: DeviceEngine) -> None:
        close(self)
        closed.append(len(self.ranks))

    def stop(step: LoadStep) -> None:
        if step.phase == "warming":
            raise error

    given_back = list[int]()
    monkeypatch.setattr(DeviceEngine, "close", noted)
    monkeypatch.setattr(gpus, "give_back", lambda: given_back.append(len(closed)))
    with pytest.raises(type(error)):
        dsv4nb.load("toy", devices=0, max_seq=MAX_SEQ, progress=stop)
    assert closed == [0] and given_back == [1]
    with dsv4nb.load("toy", devices=0, max_seq=MAX_SEQ) as model:
        assert model.generate("Hi", temperature=0.0, max_new=2).ids


# on GPUs alone


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are compiled, or loaded from what was compiled before, for a GPU for the first time."""
    from triton import knobs

    names = list[str]()

    def note(*, fn: Any, **told: Any) -> None:
        names.append(fn.name)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    return names


def captured(engine: DeviceEngine) -> int:
    forward = engine._forward
    sides = getattr(forward, "_sides", None) or getattr(forward, "_spans", None) or [forward]
    return sum(side.graphs.captured for side in sides)


@pytest.mark.parametrize("place", ON_GPUS)
@pytest.mark.timeout(580)
def test_h04_a24_the_real_shapes_are_compiled_and_captured_before_the_first_request(
    place: str, compiled: list[str]
) -> None:
    from dsv4nb.bench.rig import made_weights

    places, kind = PLACES[place]
    asked = Asked(shape="flash-0731", layers=4, experts=16, drafter=True, placement=kind)  # type: ignore[arg-type]
    config = asked.config()
    ranks, _ = made_weights(asked, config, [torch.device(one) for one in places])
    contract, _ = detect_contract(config, ())
    engine = DeviceEngine(ranks, config, contract, max_seq=4096)
    try:
        began = time.monotonic()
        warm_up.warm_up(engine)
        print(f"warmed up in {time.monotonic() - began:.1f} s: {len(compiled)} kernels, {captured(engine)} graphs")
        compiled.clear()
        before = captured(engine)
        for length, config_of in (
            (17, GREEDY),
            (1000, SamplerConfig(temperature=1.0, top_p=0.95)),
            (2048, SamplerConfig(temperature=0.6)),
            (333, SamplerConfig(temperature=1.0, top_k=40)),
        ):
            state = engine.new_state()
            engine.prefill(state, [(17 * i) % config.vocab_size for i in range(length)])
            for width in (1, 2, 6, 4, 3, 5):
                if engine.block_size:
                    engine.draft(state, 7, PlainChoice(config=config_of, first=state.pos + 1))
                engine.draw_rows(state, [7] * width, config_of)
                engine.commit(state, 1)
            if engine.block_size:
                engine.draft_and_draw(state, 7, 6, drafts_by=config_of, config=config_of)
            snapshot = engine.capture(state)
            engine.release(state)
            state = engine.restore(snapshot)
            engine.prefill(state, [3] * 21)
            engine.release(state)
        assert compiled == []
        assert captured(engine) - before <= 1
    finally:
        engine.close()


@pytest.mark.parametrize("place", ON_GPUS)
def test_h04_a24_nothing_is_compiled_in_the_first_chat(place: str, compiled: list[str]) -> None:
    places, kind = PLACES[place]
    ids = tuple(range(len(places)))
    with dsv4nb.load("toy", devices=ids, placement=kind if len(ids) > 1 else None, max_seq=4096) as model:
        compiled.clear()
        engine: Any = model.engine
        before, waited = captured(engine), []
        for number in range(5):
            chat = model.chat(temperature=0.0 if number % 2 else 1.0, max_new=24)
            first = chat.send(f"{number}. {ASKED}")
            waited.append(first.done.timings.first_token_s)
            chat.send("What is 47 + 38?", logprobs=2)
            chat.fork().send("Hello!", top_p=0.9)
            model.generate(ASKED * 20, max_new=8, presence_penalty=0.5, spec=False)
        print("first tokens after", *(f"{1e3 * (one or 0):.1f}" for one in waited), "ms")
        assert compiled == []
        assert captured(engine) - before <= 1
