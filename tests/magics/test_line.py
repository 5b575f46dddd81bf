from __future__ import annotations

from typing import Any

import pytest
from IPython.core.error import UsageError

from dsv4nb.events import Timings
from dsv4nb.magics.line import Shelf


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
