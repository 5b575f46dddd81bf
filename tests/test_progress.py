"""What a load shows: in a terminal, in a file, to a function; and that stopping it leaves nothing."""

from __future__ import annotations

import gc
import io
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dsv4nb.errors import CheckpointError, LoadCancelled, RequestError
from dsv4nb.model import load
from dsv4nb.progress import Line, _Opener, line
from dsv4nb.stream.loading import Figures, Loading
from dsv4nb.testing.tiny_checkpoint import write_tiny_checkpoint
from dsv4nb.testing.tiny_tokenizer import write_tiny_tokenizer
from dsv4nb.weights.progress import LoadStep
from dsv4nb.weights.reader import Reader
from dsv4nb.widgets.loading import LoadPanel


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_checkpoint(
        tmp_path_factory.mktemp("progress") / "tiny",
        n_routed_experts=4,
        compress_ratios=[0, 4],
        num_hidden_layers=2,
        num_hash_layers=1,
    )
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that each tensor takes."""
    read, seconds = Reader.read, [0.01]

    def slowly(self: Reader, name: str) -> Tensor:
        time.sleep(seconds[0])
        return read(self, name)

    monkeypatch.setattr(Reader, "read", slowly)
    return seconds


def held() -> int:
    gc.collect()
    return sum(one.nbytes for one in gc.get_objects() if type(one) is Tensor)


def figures(**other: Any) -> Figures:
    step = LoadStep(
        phase="weights", done_bytes=42_000_000_000, total_bytes=168_000_000_000, shard="s", n_shard=12, n_shards=46
    )
    told: dict[str, Any] = {"name": "Flash", "state": "loading", "step": step, "elapsed_s": 20.0, "error": ""}
    return Figures(**told | {"rate": 2.1e9, "eta_s": 60.0} | other)


def test_j19_the_line_tells_bytes_rate_and_what_is_left() -> None:
    assert line(figures()) == (
        "loading Flash  ██████░░░░░░░░░░░░░░░░░░ 25 %  42.0 GB of 168.0 GB  2.1 GB/s  60 s left  file 12 of 46"
    )
    assert line(figures(state="cancelling", rate=None, eta_s=None)).endswith("file 12 of 46  cancelling")
    assert line(figures(step=LoadStep(phase="headers"))) == "loading Flash  reading headers"
    assert line(figures(state="loaded")) == "loaded Flash in 20.0 s"
    assert line(figures(state="failed", error="E: x")) == "E: x"


def test_a_terminal_has_one_line_that_is_replaced(folder: Path, slow: list[float]) -> None:
    out = Terminal()
    screen = Line(out)
    loading = Loading("tiny", str(folder), screen.show)
    with load(folder, progress=lambda step: loading.tell(step)):
        loading.finish(None)
    text = out.getvalue()
    assert text.count("\n") == 1 and text.rstrip(" \n").endswith(" s") and text.count("\r") > 3
    states = text.rstrip("\n").split("\r")
    assert "loading tiny" in states[1] and "loaded tiny in" in states[-1]
    assert len(states[-1]) >= len(states[-2].rstrip()), "what was longer is overwritten"


def test_a_file_has_a_line_at_the_end() -> None:
    out = io.StringIO()
    screen = Line(out)
    loading = Loading("tiny", "", screen.show)
    loading.tell(LoadStep(phase="weights", done_bytes=1, total_bytes=2))
    assert out.getvalue() == ""
    loading.finish(None)
    assert out.getvalue() == "loaded tiny in 0.0 s\n"


@pytest.mark.parametrize(
    ("progress", "seconds", "shows"), [(None, 0.015, True), (False, 0.015, False), (None, 0, False)]
)
def test_a_load_shows_itself_when_it_takes_long(
    folder: Path, slow: list[float], monkeypatch: pytest.MonkeyPatch, progress: Any, seconds: float, shows: bool
) -> None:
    out, slow[0] = Terminal(), seconds
    monkeypatch.setattr(sys, "stderr", out)
    load(folder, progress=progress).close()
    assert ("loaded" in out.getvalue()) == shows
    assert shows or not out.getvalue()


@pytest.mark.parametrize(("seconds", "shows"), [(0.9, False), (1.1, True)])
def test_h03_a_model_that_warms_up_for_long_shows_itself(
    monkeypatch: pytest.MonkeyPatch, seconds: float, shows: bool
) -> None:
    out, now = Terminal(), [0.0]
    monkeypatch.setattr(sys, "stderr", out)
    loading = Loading("tiny", "", _Opener(at_once=False), clock=lambda: now[0])
    loading.tell(LoadStep(phase="engine"))
    now[0] = seconds
    loading.tell(LoadStep(phase="warming"))
    loading.finish(None)
    assert ("loading tiny  warming up" in out.getvalue()) == ("loaded tiny" in out.getvalue()) == shows


def test_nothing_is_written_into_a_file_unasked(
    folder: Path, slow: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, slow[0] = io.StringIO(), 0.015
    monkeypatch.setattr(sys, "stderr", out)
    load(folder).close()
    assert out.getvalue() == ""
    slow[0] = 0
    load(folder, progress=True).close()
    assert out.getvalue().startswith("loaded ")


def test_a_function_is_told_every_phase(folder: Path) -> None:
    steps: list[LoadStep] = []
    with load(folder, progress=steps.append) as model:
        assert steps[0].phase == "headers" and steps[-1].phase == "engine"
        assert steps[-1].done_bytes == steps[-1].total_bytes > 0
        told = len(steps)
        with load(folder, progress=steps.append) as other:
            assert other.engine is model.engine
        assert len(steps) == told + 1, "an engine that is shared is not read again"


def test_j19_a_function_that_raises_stops_the_load_and_everything_is_free(folder: Path) -> None:
    before, threads = held(), threading.active_count()

    def stop(step: LoadStep) -> None:
        if step.phase == "engine":
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as stopped:
        load(folder, progress=stop)
    assert stopped.value.__traceback__ is not None and held() == before and threading.active_count() == threads
    with load(folder) as model:
        assert model.generate("hi", max_new=1).ids


def test_j19_cancelled_half_way_the_memory_is_back_and_a_second_load_works(folder: Path, slow: list[float]) -> None:
    before = held()
    panel = LoadPanel()
    caught: list[BaseException] = []

    def work() -> None:
        try:
            load(folder, progress=panel)
        except BaseException as error:
            caught.append(error)

    slow[0] = 0.01
    thread = threading.Thread(target=work)
    thread.start()
    deadline = time.monotonic() + 10
    while (
        panel._loading is None
        or panel._loading.step.done_bytes < panel._loading.step.total_bytes / 2
        or not (panel._loading.step.total_bytes)
    ):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    panel._loading.cancel()
    thread.join(5)
    assert isinstance(caught[0], LoadCancelled) and "cancelled at" in str(caught[0])
    assert held() == before
    slow[0] = 0
    with load(folder, progress=panel) as model:
        assert model.generate("hi", max_new=1).ids
        panel._pump.drain()
        assert panel.state["state"] == "loaded" and panel.state["facts"] == [list(row) for row in model.info.rows()]
    panel.close()


def test_a_screen_that_fails_stops_no_load(folder: Path, slow: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Terminal):
        def write(self, text: str) -> int:
            raise OSError("no terminal any more")

    slow[0] = 0.015
    monkeypatch.setattr(sys, "stderr", Broken())
    load(folder, progress=True).close()


def test_a_load_that_is_refused_is_told_in_the_panel(tmp_path: Path) -> None:
    panel = LoadPanel()
    with pytest.raises(CheckpointError):
        load(tmp_path, progress=panel)
    panel._pump.drain()
    assert panel.state["state"] == "failed" and "NotACheckpoint" in panel.state["error"]
    panel.close()


def test_what_shows_nothing_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="progress is 5; it must be None, True, False, a LoadPanel or a function"):
        load(folder, progress=5)
