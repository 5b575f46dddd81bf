"""`%dsv4 bench`: what it measures on a loaded model, and an interrupt of it."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

SAID = "one two three four five six seven eight nine ten eleven twelve"


def goes_on(ids: list[int]) -> Any:
    """Draft two right tokens and a wrong one."""

    def drafts(said: tuple[int, ...]) -> list[int]:
        at = ids.index(said[-1]) + 1 if said[-1] in ids else 0
        return [*ids[at : at + 2], 5][:3]

    return drafts


@pytest.fixture
def published(ip: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    from IPython.core.displaypub import CapturingDisplayPublisher

    screen = CapturingDisplayPublisher()
    monkeypatch.setattr(ip, "display_pub", screen)
    monkeypatch.setattr(ip, "kernel", object(), raising=False)
    return screen.outputs


def labels(text: str) -> list[str]:
    return [line[:12].strip() for line in text.splitlines()]


def test_a_model_without_a_drafter_is_measured_plainly(cells: Any, fake: Any, capsys: Any) -> None:
    model = fake(SAID)
    cells.run("%dsv4 bench --new 4 --runs 2")
    said = capsys.readouterr().out
    assert labels(said) == ["model", "asked", "first token", "decode", "speculated"]
    assert "fake on CPU" in said and "4 tokens, 2 runs" in said and "tok/s, plain" in said
    assert "not: the checkpoint has no drafter" in said
    assert model.engine.calls["prefill"] == 3  # two runs, and one that warms up


def test_with_a_drafter_both_routes_are_measured(cells: Any, fake: Any, published: list[dict[str, Any]]) -> None:
    ids = list(range(300, 312))
    fake([ids], drafts=goes_on(ids))
    cells.run("%dsv4 bench --new 8 --runs 1 --temperature 0")
    shown = [output["data"]["text/plain"] for output in published]
    assert len({output["transient"]["display_id"] for output in published}) == 1
    begun, plain = (labels(text) for text in shown[1:3])
    assert begun == ["model", "asked"] and plain == ["model", "asked", "first token", "decode"]
    assert labels(shown[-1]) == [*plain, "speculated", "a round", "accepted", "draft", "verify"]
    assert "a round     3.00 tokens" in shown[-1] and "1.00, 1.00, 0.00" in shown[-1]
    assert published[-1]["data"]["text/html"].count("<tr>") == 9


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--new 1", "'1' is no whole number of at least 2"),
        ("--runs x", "'x' is no whole number of at least 1"),
        ("x", "there is no variable 'x'; pass m"),
        ("--new 5000", "new is 5000; there is room for 3900 after a prompt of 100, with max_seq 4096"),
        ("--temperature inf", "temperature is inf; it must be a finite number"),
    ],
)
def test_a_bad_line_is_refused_before_anything_runs(cells: Any, fake: Any, line: str, said: str) -> None:
    model = fake(SAID)
    assert said in cells.refused(f"%dsv4 bench {line}")
    assert not any(model.engine.calls.values())


def test_in_a_terminal_an_interrupted_bench_prints_what_was_measured(
    cells: Any, fake: Any, ip: Any, capsys: Any
) -> None:
    ids = list(range(300, 312))
    prefills: list[int] = []
    stops_at = 5

    def on_step(step: str, state: Any) -> None:
        prefills.extend([1] * (step == "prefill"))
        if len(prefills) == stops_at and step == "forward_rows":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    fake([ids], drafts=goes_on(ids), delay_s=0.01, on_step=on_step)
    ip.run_cell("%dsv4 bench --new 8 --runs 1")
    said = capsys.readouterr().out
    assert labels(said)[:4] == ["model", "asked", "first token", "decode"] and "what was measured is shown" in said
    stops_at = len(prefills) + 1
    ip.run_cell("%dsv4 bench --new 8 --runs 1")
    said = capsys.readouterr().out
    assert "Stopped; nothing was measured" in said and "decode" not in said


def test_an_interrupted_bench_keeps_what_was_measured(
    cells: Any, fake: Any, ip: Any, published: list[dict[str, Any]], capsys: Any
) -> None:
    ids = list(range(300, 312))
    prefills: list[int] = []

    def on_step(step: str, state: Any) -> None:
        prefills.extend([1] * (step == "prefill"))
        if len(prefills) == 5 and step == "forward_rows":  # of the replies that are speculated
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    model = fake([ids], drafts=goes_on(ids), delay_s=0.01, on_step=on_step)
    done = ip.run_cell("%dsv4 bench --new 8 --runs 1")
    assert isinstance(done.error_in_exec, KeyboardInterrupt)
    assert labels(published[-1]["data"]["text/plain"]) == ["model", "asked", "first token", "decode"]
    said = capsys.readouterr().out
    assert "Stopped; what was measured is shown, and the model can be used on." in said and "Traceback" not in said
    assert model.queue == []
    cells.run("%%dsv4\nhi")
