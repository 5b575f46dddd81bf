"""Models as variables: loaded, found, forgotten."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.error import UsageError

from dsv4nb.magics.defaults import Defaults
from dsv4nb.magics.line import Line
from dsv4nb.magics.shelf import Shelf


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


def notebook(names: dict[str, Any], load: Any) -> Line:
    return Line(names, Shelf(names, load), Defaults())


def test_load_binds_m_and_returns_the_card(loader: Loader) -> None:
    names: dict[str, Any] = {}
    assert notebook(names, loader).obey("load toy") == "a model of words"
    assert loader.calls == [("toy", {})]
    assert names["m"].info == "a model of words"


def test_load_takes_the_words_of_load(loader: Loader) -> None:
    words = (
        "load toy --max-seq 512 --devices cpu --contract fp32_full --encoding v0731 --cache-mib 64 "
        "--host-cache-mib 8.5 --no-drafter --spec-depth 3 --spec-window slot:0.6:1"
    )
    notebook({}, loader).obey(words)
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
    line = notebook({}, loader)
    line.obey("load toy --no-drafter")
    assert line.obey("load toy --no-drafter") == "a model of words"
    for other in ("load toy", "load toy --no-drafter --cache-mib 8"):
        with pytest.raises(UsageError, match="'m' already holds toy"):
            line.obey(other)
    assert len(loader.calls) == 1


def test_a_path_may_have_spaces_and_the_name_be_chosen(loader: Loader) -> None:
    names: dict[str, Any] = {}
    notebook(names, loader).obey("load '/models/my flash' --as flash --max-seq 4096")
    assert loader.calls == [("/models/my flash", {"max_seq": 4096})]
    assert list(names) == ["flash"]


def test_a_cell_that_is_run_again_loads_nothing_twice(loader: Loader) -> None:
    line = notebook({}, loader)
    line.obey("load toy")
    assert line.obey("load toy") == "a model of words"
    assert len(loader.calls) == 1
    with pytest.raises(UsageError, match=r"'m' already holds toy; %dsv4 unload m frees it"):
        line.obey("load toy --max-seq 128")


def test_unload_closes_and_forgets(loader: Loader) -> None:
    names: dict[str, Any] = {}
    line = notebook(names, loader)
    line.obey("load toy")
    model = names["m"]
    assert line.obey("unload") is None
    assert model.closed == 1 and names == {}
    line.obey("load toy")
    assert len(loader.calls) == 2


def test_with_several_models_the_name_must_be_said(loader: Loader) -> None:
    names: dict[str, Any] = {}
    shelf = Shelf(names, loader)
    line = Line(names, shelf, Defaults())
    line.obey("load toy")
    assert shelf.find(None) is names["m"]
    line.obey("load toy --as other")
    with pytest.raises(UsageError, match=r"several models are loaded; pass --model m or other"):
        shelf.find(None)
    with pytest.raises(UsageError, match=r"name one of m, other"):
        line.obey("unload")
    assert shelf.find("other") is names["other"]
    assert repr(line.obey("status")) == "m\na model of words\n\nother\na model of words"


def test_a_model_that_python_loaded_is_found_and_listed_once(make_model: Any) -> None:
    model = make_model()
    names = {"_": model, "flash": model, "same": model, "_3": make_model()}
    shelf = Shelf(names, None)  # type: ignore[arg-type]
    assert shelf.find(None) is model and shelf.only() is model
    assert repr(shelf.status(None)) == "flash\na model of words"  # type: ignore[arg-type]
    model.close()
    assert shelf.only() is None
    with pytest.raises(UsageError, match="no model is loaded"):
        shelf.find(None)


def test_the_configured_name_is_loaded_into_and_asked_first(loader: Loader) -> None:
    names: dict[str, Any] = {}
    shelf = Shelf(names, loader, usual=lambda: "flash")
    line = Line(names, shelf, Defaults())
    line.obey("load toy")
    line.obey("load toy --as other")
    assert shelf.find(None) is names["flash"] and shelf.find("other") is names["other"]
    line.obey("unload flash")
    with pytest.raises(UsageError, match="there is no variable 'flash'; pass --model other"):
        shelf.find(None)


def test_a_variable_that_was_given_another_value_is_no_longer_a_model(loader: Loader) -> None:
    names: dict[str, Any] = {}
    line = notebook(names, loader)
    line.obey("load toy")
    names["m"] = 3
    assert "no model is loaded" in repr(line.obey("status"))
    line.obey("load toy")
    assert len(loader.calls) == 2


def test_a_model_that_was_closed_in_python_can_be_loaded_again(loader: Loader) -> None:
    names: dict[str, Any] = {}
    line = notebook(names, loader)
    line.obey("load toy")
    names["m"].close()
    assert "no model is loaded" in repr(line.obey("status"))
    line.obey("load toy")
    assert not names["m"].is_closed


def test_status_escapes_what_it_shows(loader: Loader) -> None:
    names: dict[str, Any] = {}
    line = notebook(names, loader)
    line.obey("load toy")
    names["m"].info = "<script>"
    status: Any = line.obey("status")
    assert "&lt;script&gt;" in status._repr_html_()
