"""The frozen checkpoint of `tests/data/goldens`: one layer of each kind, window 64, 16 picked entries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

# before any kernel module is imported: the decorator decides what a kernel is
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import dsv4nb
from dsv4nb.checkpoint.opening import Checkpoint, open_checkpoint
from dsv4nb.contract import FP32_PLAIN, Contract
from dsv4nb.engine.cpu import CpuEngine
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.device_state import DeviceState
from dsv4nb.testing.twin_kernels import twin_kernels
from dsv4nb.weights.loader import load_weights
from dsv4nb.weights.store import Weights

MakeEngine = Callable[..., CpuEngine]


@pytest.fixture(scope="session")
def goldens() -> Path:
    return Path(__file__).parents[1] / "data" / "goldens"


@pytest.fixture(scope="session")
def checkpoint(goldens: Path) -> Checkpoint:
    return open_checkpoint(goldens / "checkpoint", require_tokenizer=False)


@pytest.fixture(scope="session")
def weights(checkpoint: Checkpoint) -> Weights:
    return load_weights(checkpoint)


@pytest.fixture(scope="session")
def make_engine(checkpoint: Checkpoint, weights: Weights) -> MakeEngine:
    """Make an engine on the frozen weights."""

    def make(contract: Contract = FP32_PLAIN, *, max_seq: int = 1024, threads: int = 1) -> CpuEngine:
        return CpuEngine(weights, checkpoint.config, contract, max_seq=max_seq, threads=threads)

    return make


@pytest.fixture(scope="session")
def prompt(checkpoint: Checkpoint) -> list[int]:
    """Enough ids for every cut; the frozen vocabulary has 256."""
    return [(37 * i + 11) % (checkpoint.config.vocab_size - 8) + 8 for i in range(500)]


@pytest.fixture(scope="session")
def facts() -> list[int]:
    """384 ids of the bundled model, several times its window: a text about facts."""
    ids: list[int] = []
    with dsv4nb.load("toy", devices="cpu") as model:
        while len(ids) < 384:
            ids += model.tokenize("Anna went from Paris to Rome on Monday. The code word is silver otter. ")
    return ids[:384]


@pytest.fixture(scope="session")
def toy() -> Checkpoint:
    return open_checkpoint(Path(dsv4nb.__file__).parent / "toy" / "model")


@pytest.fixture(scope="module", params=["twins", pytest.param("gpu", marks=pytest.mark.gpu2)])
def pair_places(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The devices of a pair."""
    is_gpu = request.param == "gpu"
    with nullcontext() if is_gpu else twin_kernels():
        yield ["cuda:0", "cuda:1"] if is_gpu else ["cpu", "cpu"]


@pytest.fixture(scope="session")
def states_behind() -> Callable[[DeviceEngine, list[int]], Callable[[int], DeviceState]]:
    """Makes what makes states behind the first n tokens, each from a snapshot of the one before."""

    def of(engine: DeviceEngine, tokens: list[int]) -> Callable[[int], DeviceState]:
        made = {0: engine.capture(engine.new_state())}

        def make(pos: int) -> DeviceState:
            nearest = max(known for known in made if known <= pos)
            state = engine.restore(made[nearest])
            if nearest < pos:
                engine.prefill(state, tokens[nearest:pos])
                made[pos] = engine.capture(state)
            return state

        return make

    return of


@pytest.fixture
def indexed_by_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets loops of interpreted kernels run over counts: numpy makes no int of the arrays that stand for scalars."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, not interpreted")
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_index)


@pytest.fixture
def unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a chunk have no more rows than tokens: an interpreter would take its time for each."""
    monkeypatch.setattr("dsv4nb.engine.rank_chunk.padded_rows", lambda tokens: tokens)
