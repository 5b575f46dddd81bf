from __future__ import annotations

import threading
from typing import Any

import pytest
from IPython.core.error import UsageError

import dsv4nb
from dsv4nb.errors import RequestError
from dsv4nb.events import Timings
from dsv4nb.magics.defaults import Defaults
from dsv4nb.magics.line import Line
from dsv4nb.magics.shelf import Shelf
from dsv4nb.testing.fake_model import fake_model


def notebook(names: dict[str, Any], load: Any = None) -> Line:
    return Line(names, Shelf(names, load), Defaults())


def test_what_a_model_tells_of_itself() -> None:
    with fake_model(["one two", "three"], name="fake", drafts=lambda ids: [1]) as model:
        line = notebook({"m": model})
        assert repr(line.obey("spec")).startswith("drafter     DSpark, 5 drafts a round\nmode        exact")
        assert repr(line.obey("cache m")).startswith("starts      none yet\nanchors     none")
        assert repr(line.obey("queue")) == "no request is waiting or running"
        chat = model.chat(max_new=2, seed=0)
        chat.send("hello")
        assert repr(line.obey("cache")).startswith("starts      1 reset")
    with fake_model(name="plain") as model:
        line = notebook({"m": model})
        assert repr(line.obey("spec m")) == "drafter     none: the checkpoint has no drafter"


def test_the_queue_lists_what_has_not_ended() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def on_step(step: str, state: Any) -> None:
        begun.set()
        go_on.wait(5)

    with fake_model("one two three", on_step=on_step) as model:
        line = notebook({"m": model})
        tickets = [model.submit(text, seed=0) for text in ("hi", "hello there")]
        assert begun.wait(5)
        shown = repr(line.obey("queue")).splitlines()
        go_on.set()
        for ticket in tickets:
            ticket.result()
    assert shown[0].split() == ["state", "prompt", "since"]
    assert [line.split()[0] for line in shown[1:]] == ["running", "queued"]
    assert all(line.endswith(" s") for line in shown[1:])


def test_doctor_returns_its_report() -> None:
    with fake_model("one two three") as model:
        line = notebook({"m": model})
        report: Any = line.obey("doctor m --seconds 1e-9")
        assert "6 skipped" in report.title and report.model == "fake" and not report.ok
        with pytest.raises(RequestError, match=r"seconds is -1\.0; it must be a number above 0"):
            line.obey("doctor --seconds -1")
        with pytest.raises(UsageError, match="%dsv4 doctor: there is no variable 'x'"):
            line.obey("doctor x")


def test_without_a_model_the_doctor_tells_of_the_machine() -> None:
    told = repr(notebook({}).obey("doctor"))
    assert f"dsv4nb      {dsv4nb.__version__}" in told and "ipykernel" in told and "none is loaded" in told


class Timed:
    """A model that has run a request."""

    timings: Any = Timings(
        queue_s=0.0, prepare_s=0.002, marks=(("called", 0.0), ("queued", 0.002), ("prefilled", 0.05), ("ended", 0.1))
    )
    caps = "chat and tools"
    is_closed = False

    def submit(self) -> None:
        """What tells a model from anything else."""


def test_capabilities_and_timings_of_a_model_in_a_variable() -> None:
    names: dict[str, Any] = {"m": Timed()}
    line = notebook(names)
    assert line.obey("caps") == "chat and tools" and line.obey("caps m") == "chat and tools"
    shown = repr(line.obey("timings")).splitlines()
    assert [line.split()[:3] for line in shown] == [
        ["called", "0.0", "ms"],
        ["queued", "2.0", "ms"],
        ["prefilled", "50.0", "ms"],
        ["ended", "100.0", "ms"],
    ]
    assert [line.count("█") for line in shown] == [1, 1, 19, 20]
    names["m"].timings = None
    assert repr(line.obey("timings")) == "no request has ended yet"
    with pytest.raises(UsageError, match="%dsv4 caps: there is no variable 'x'; pass m"):
        line.obey("caps x")
