from __future__ import annotations

import threading
from typing import Any

import pytest
from IPython.core.error import UsageError

from dsv4nb.errors import RequestError
from dsv4nb.events import Timings
from dsv4nb.magics.line import Shelf
from dsv4nb.testing.fake_model import fake_model


class Loader:
    def __init__(self, make_model: Any) -> None:
        self.make_model = make_model
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, path: str, **options: Any) -> Any:
        self.calls.append((path, options))
        return self.make_model()


@pytest.fixture
def loader(make_model: Any) -> Loader:
    return Loader(make_model)


def test_load_binds_m_and_returns_the_card(loader: Loader) -> None:
    names: dict[str, Any] = {}
    assert Shelf(names, loader).obey("load toy") == "a model of words"
    assert loader.calls == [("toy", {})]
    assert names["m"].info == "a model of words"


def test_load_takes_the_words_of_load(loader: Loader) -> None:
    line = (
        "load toy --max-seq 512 --devices cpu --contract fp32_full --encoding v0731 --cache-mib 64 "
        "--host-cache-mib 8.5 --no-drafter --spec-depth 3 --spec-window slot:0.6:1"
    )
    Shelf({}, loader).obey(line)
    expected = {
        "max_seq": 512,
        "devices": "cpu",
        "contract": "fp32_full",
        "encoding": "v0731",
        "cache_mib": 64.0,
        "host_cache_mib": 8.5,
        "drafter": False,
        "spec_depth": 3,
        "spec_window": ("slot", 0.6, 1),
    }
    assert loader.calls == [("toy", expected)]


def test_a_cell_that_loads_with_other_words_loads_no_second_model_into_the_name(loader: Loader) -> None:
    shelf = Shelf({}, loader)
    shelf.obey("load toy --no-drafter")
    assert shelf.obey("load toy --no-drafter") == "a model of words"
    for line in ("load toy", "load toy --no-drafter --cache-mib 8"):
        with pytest.raises(UsageError, match="'m' already holds toy"):
            shelf.obey(line)
    assert len(loader.calls) == 1


def test_a_path_may_have_spaces_and_the_name_be_chosen(loader: Loader) -> None:
    names: dict[str, Any] = {}
    Shelf(names, loader).obey("load '/models/my flash' --as flash --max-seq 4096")
    assert loader.calls == [("/models/my flash", {"max_seq": 4096})]
    assert list(names) == ["flash"]


def test_a_cell_that_is_run_again_loads_nothing_twice(loader: Loader) -> None:
    shelf = Shelf({}, loader)
    shelf.obey("load toy")
    assert shelf.obey("load toy") == "a model of words"
    assert len(loader.calls) == 1
    with pytest.raises(UsageError, match=r"'m' already holds toy; %dsv4 unload m frees it"):
        shelf.obey("load toy --max-seq 128")


def test_unload_closes_and_forgets(loader: Loader) -> None:
    names: dict[str, Any] = {}
    shelf = Shelf(names, loader)
    shelf.obey("load toy")
    model = names["m"]
    assert shelf.obey("unload") is None
    assert model.closed == 1 and names == {}
    shelf.obey("load toy")
    assert len(loader.calls) == 2


def test_with_several_models_the_name_must_be_said(loader: Loader) -> None:
    names: dict[str, Any] = {}
    shelf = Shelf(names, loader)
    shelf.obey("load toy")
    assert shelf.find(None) is names["m"]
    shelf.obey("load toy --as other")
    with pytest.raises(UsageError, match=r"several models are loaded; pass --model m or other"):
        shelf.find(None)
    with pytest.raises(UsageError, match=r"name one of m, other"):
        shelf.obey("unload")
    assert shelf.find("other") is names["other"]
    assert repr(shelf.obey("status")) == "m\na model of words\n\nother\na model of words"


def test_a_variable_that_was_given_another_value_is_no_longer_a_model(loader: Loader) -> None:
    names: dict[str, Any] = {}
    shelf = Shelf(names, loader)
    shelf.obey("load toy")
    names["m"] = 3
    assert "no model is loaded" in repr(shelf.obey("status"))
    shelf.obey("load toy")
    assert len(loader.calls) == 2


def test_a_model_that_was_closed_in_python_can_be_loaded_again(loader: Loader) -> None:
    names: dict[str, Any] = {}
    shelf = Shelf(names, loader)
    shelf.obey("load toy")
    names["m"].close()
    assert "no model is loaded" in repr(shelf.obey("status"))
    shelf.obey("load toy")
    assert not names["m"].is_closed


def test_status_escapes_what_it_shows(loader: Loader) -> None:
    names: dict[str, Any] = {}
    shelf = Shelf(names, loader)
    shelf.obey("load toy")
    names["m"].info = "<script>"
    status: Any = shelf.obey("status")
    assert "&lt;script&gt;" in status._repr_html_()


def test_what_a_model_tells_of_itself() -> None:
    with fake_model(["one two", "three"], name="fake", drafts=lambda ids: [1]) as model:
        shelf = Shelf({"m": model}, lambda path: None)
        assert repr(shelf.obey("spec")).startswith("drafter     DSpark, 5 drafts a round\nmode        exact")
        assert repr(shelf.obey("cache m")).startswith("starts      none yet\nanchors     none")
        assert repr(shelf.obey("queue")) == "no request is waiting or running"
        chat = model.chat(max_new=2, seed=0)
        chat.send("hello")
        assert repr(shelf.obey("cache")).startswith("starts      1 reset")
    with fake_model(name="plain") as model:
        shelf = Shelf({"m": model}, lambda path: None)
        assert repr(shelf.obey("spec m")) == "drafter     none: the checkpoint has no drafter"


def test_the_queue_lists_what_has_not_ended() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def on_step(step: str, state: Any) -> None:
        begun.set()
        go_on.wait(5)

    with fake_model("one two three", on_step=on_step) as model:
        shelf = Shelf({"m": model}, lambda path: None)
        tickets = [model.submit(text, seed=0) for text in ("hi", "hello there")]
        assert begun.wait(5)
        shown = repr(shelf.obey("queue")).splitlines()
        go_on.set()
        for ticket in tickets:
            ticket.result()
    assert shown[0].split() == ["state", "prompt", "since"]
    assert [line.split()[0] for line in shown[1:]] == ["running", "queued"]
    assert all(line.endswith(" s") for line in shown[1:])


def test_doctor_returns_its_report() -> None:
    with fake_model("one two three") as model:
        shelf = Shelf({"m": model}, lambda path: None)
        report: Any = shelf.obey("doctor m --seconds 1e-9")
        assert "6 skipped" in report.title and report.model == "fake" and not report.ok
        with pytest.raises(RequestError, match=r"seconds is -1\.0; it must be a number above 0"):
            shelf.obey("doctor --seconds -1")
        with pytest.raises(UsageError, match="%dsv4 doctor: there is no variable 'x'"):
            shelf.obey("doctor x")


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
    shelf = Shelf(names, lambda path: None)
    assert shelf.obey("caps") == "chat and tools" and shelf.obey("caps m") == "chat and tools"
    shown = repr(shelf.obey("timings")).splitlines()
    assert [line.split()[:3] for line in shown] == [
        ["called", "0.0", "ms"],
        ["queued", "2.0", "ms"],
        ["prefilled", "50.0", "ms"],
        ["ended", "100.0", "ms"],
    ]
    assert [line.count("█") for line in shown] == [1, 1, 19, 20]
    names["m"].timings = None
    assert repr(shelf.obey("timings")) == "no request has ended yet"
    with pytest.raises(UsageError, match="%dsv4 caps: there is no variable 'x'; %dsv4 load PATH loads one"):
        shelf.obey("caps x")
