"""`%dsv4 set` and `%config Dsv4nb`: what a cell asks for that does not say."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.error import UsageError
from traitlets import TraitError
from traitlets.config import Config

from dsv4nb.errors import RequestError
from dsv4nb.magics.defaults import Defaults, check
from dsv4nb.magics.extension import Dsv4nb
from dsv4nb.testing.fake_model import fake_model


def test_names_and_values_are_the_options_of_a_cell() -> None:
    defaults = Defaults()
    defaults.obey("temperature 0.2 top_p 0.9 --max-new 8 thinking on spec off stop END frequency-penalty -0.5", None)
    expected = {
        "temperature": 0.2,
        "top_p": 0.9,
        "max_new": 8,
        "thinking": True,
        "spec": False,
        "stop": ["END"],
        "frequency_penalty": -0.5,
    }
    assert defaults.under({}) == expected
    defaults.obey("--temperature 0.3 --no-thinking", None)
    assert defaults.under({}) == {**expected, "temperature": 0.3, "thinking": False}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("temprature 1", "'temprature' is unknown; did you mean temperature? Valid: system, thinking, effort"),
        ("--temprature 1", "'--temprature' is unknown; did you mean --temperature? Valid: --help, --reset"),
        ("temperature", "'temperature' has no value; pass NAME VALUE pairs"),
        ("seed 7 temperature", "'temperature' has no value"),
        ("thinking maybe", "thinking is 'maybe'; it must be on or off"),
        ("temperature hot", "argument --temperature: invalid float value: 'hot'"),
        ("--reset temprature", "did you mean temperature?"),
        ("--temperature 0.5 warm", "'warm' is unknown"),
        ("system 'open", "No closing quotation"),
    ],
)
def test_a_line_that_is_not_understood_changes_nothing(line: str, said: str) -> None:
    defaults = Defaults()
    defaults.obey("seed 3", None)
    with pytest.raises(UsageError) as caught:
        defaults.obey(line, None)
    assert said in str(caught.value) and str(caught.value).startswith("%dsv4 set") and "\n" not in str(caught.value)
    assert defaults.under({}) == {"seed": 3}


@pytest.mark.parametrize(
    ("line", "param"),
    [
        ("temperature 0.5 top-p 2", "top_p"),
        ("logprobs 99", "logprobs"),
        ("max-new -1", "max_new"),
        ("stop ''", "stop"),
        ("spec-depth 0", "spec_depth"),
        ("spec off spec-depth 2", "spec_depth"),
    ],
)
def test_what_every_model_refuses_is_refused_without_one_and_changes_nothing(line: str, param: str) -> None:
    defaults = Defaults()
    with pytest.raises(RequestError) as caught:
        defaults.obey(line, None)
    assert caught.value.param == param and defaults.under({}) == {}


def test_a_model_refuses_in_its_own_words() -> None:
    defaults = Defaults()
    defaults.obey("spec-depth 3", None)
    with fake_model() as model, pytest.raises(RequestError, match="the checkpoint has no drafter; leave it out"):
        defaults.obey("temperature 0.5", model)
    assert defaults.under({}) == {"spec_depth": 3}


def test_reset_forgets_the_named_ones_or_all() -> None:
    defaults = Defaults()
    defaults.obey("temperature 0.2 top-p 0.9 seed 1", None)
    defaults.obey("--reset top-p temperature", None)
    assert defaults.under({}) == {"seed": 1}
    assert repr(defaults.obey("--reset", None)) == "nothing is set; the checkpoint's own values apply"
    defaults.obey("temperature 0.2", None)
    defaults.obey("--reset --seed 2", None)
    assert defaults.under({}) == {"seed": 2}


def test_the_table_tells_who_says_so() -> None:
    defaults = Defaults(lambda: {"temperature": 0.7, "max_new": 5})
    with fake_model(drafts=lambda ids: [1]) as model:
        settings = defaults.obey("temperature 0 spec-window slot:0.5 thinking off stop a stop b", model)
    origins = {one.name: (one.value, one.origin) for one in settings.settings}
    assert origins["temperature"] == ("0", "set") and origins["max-new"] == ("5", "%config")
    assert origins["top-p"] == ("1", "model") and origins["spec-window"] == ("slot:0.5", "set")
    assert origins["thinking"] == ("off", "set") and origins["stop"] == ("'a', 'b'", "set")
    assert "seed" not in origins
    assert repr(settings).splitlines()[0].split() == ["value", "from"]
    assert "<th" in settings._repr_html_() and "&#x27;a&#x27;" in settings._repr_html_()


@pytest.mark.parametrize(
    ("chosen", "line", "asked"),
    [
        ("temperature 0.2", {"temperature": 1.0}, {"temperature": 1.0}),
        ("thinking on effort high", {}, {"thinking": True, "effort": "high"}),
        ("thinking on effort high", {"thinking": False}, {"thinking": False}),
        ("effort high", {}, {}),
        ("effort high", {"thinking": True}, {"thinking": True, "effort": "high"}),
        ("spec-depth 3 seed 1", {"spec": False}, {"seed": 1, "spec": False}),
        ("spec off", {"spec_depth": 2}, {"spec_depth": 2}),
    ],
)
def test_the_line_wins_and_what_it_makes_void_is_left_out(
    chosen: str, line: dict[str, Any], asked: dict[str, Any]
) -> None:
    defaults = Defaults()
    defaults.obey(chosen, None)
    assert defaults.under(line) == asked


def test_a_thinking_chat_takes_the_effort() -> None:
    defaults = Defaults()
    defaults.obey("effort high system 'Be brief.'", None)
    assert defaults.under({}, is_thinking=True, without=("system",)) == {"effort": "high"}


def test_cells_take_the_line_then_set_then_config_then_the_model(cells: Any, fake: Any) -> None:
    fake("one two three four")
    cells.run("%%dsv4\nhi")
    assert cells.ns["_dsv4"].config.temperature == 1.0
    cells.run("%config Dsv4nb.temperature = 0.5")
    cells.run("%config Dsv4nb.max_new = 2")
    cells.run("%%dsv4\nhi")
    assert cells.ns["_dsv4"].config.temperature == 0.5 and cells.ns["_dsv4"].text == "one two"
    cells.run("%dsv4 set temperature 0.25")
    cells.run("%%dsv4\nhi")
    assert cells.ns["_dsv4"].config.temperature == 0.25
    cells.run("%%dsv4 --temperature 0 --max-new 3\nhi")
    assert cells.ns["_dsv4"].config.temperature == 0 and cells.ns["_dsv4"].text == "one two three"
    cells.run("%dsv4 set --reset")
    cells.run("%config Dsv4nb.temperature = None")
    cells.run("%%dsv4\nhi")
    assert cells.ns["_dsv4"].config.temperature == 1.0


def test_a_default_that_the_asked_model_refuses_names_who_said_so(cells: Any, fake: Any) -> None:
    model = fake()
    model.close()
    cells.run("%dsv4 set spec-depth 3")
    fake()
    said = cells.refused("%%dsv4\nhi")
    assert "the checkpoint has no drafter; leave it out. %dsv4 set said so; %dsv4 set --reset spec_depth" in said
    assert "set said so" not in cells.refused("%%dsv4 --spec-depth 2\nhi")
    cells.run("%dsv4 set --reset spec_depth")
    cells.run("%%dsv4\nhi")


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("temperature = 'hot'", "Dsv4nb.temperature is 'hot'; it must be a number"),
        ("top_p = 2", "Dsv4nb.top_p is 2.0; it must be in (0, 1]"),
        ("max_new = -3", "Dsv4nb.max_new is -3; it must be an integer of at least 0"),
        ("thinking = 1", "Dsv4nb.thinking is 1; it must be True or False"),
        ("model = '3x'", "Dsv4nb.model is '3x'; it must be the name of a variable"),
    ],
)
def test_config_refuses_in_the_words_of_a_request(cells: Any, statement: str, said: str, caplog: Any) -> None:
    cells.run(f"%config Dsv4nb.{statement}")
    assert said in caplog.text and "Traceback" not in caplog.text
    assert cells.ns["get_ipython"]().magics_manager.registry["Dsv4nb"]._configured() == {}


def test_config_is_listed_and_goes_with_the_extension(cells: Any, ip: Any, capsys: Any) -> None:
    cells.run("%config Dsv4nb")
    said = capsys.readouterr().out
    for name in ("model", "stream", "temperature", "top_p", "max_new", "thinking"):
        assert f"Dsv4nb.{name}=" in said
    cells.run("%unload_ext dsv4nb")
    cells.run("%config")
    assert "Dsv4nb" not in capsys.readouterr().out
    cells.run("%load_ext dsv4nb")


def test_a_configuration_file_sets_the_traits_and_is_checked(ip: Any) -> None:
    config = Config()
    config.Dsv4nb.temperature = 0
    config.Dsv4nb.model = "flash"
    magics = Dsv4nb(ip, config=config)
    ip.configurables.remove(magics)
    assert magics._configured() == {"temperature": 0} and magics.model == "flash"
    config.Dsv4nb.temperature = -1.0
    config.Dsv4nb.top_p = 7
    with pytest.raises(TraitError, match=r"Dsv4nb\.top_p is 7\.0; it must be in \(0, 1\]"):
        Dsv4nb(ip, config=config)
    ip.configurables.pop()


def test_not_streaming_can_be_configured_and_undone_on_the_line(cells: Any, fake: Any, capsys: Any) -> None:
    fake("one two")
    cells.run("%config Dsv4nb.stream = False")
    cells.run("%%dsv4\nhi")
    assert capsys.readouterr().out == "one two\n"
    cells.run("%%dsv4 --stream\nhi")
    assert capsys.readouterr().out == "one two\n"


def test_a_name_that_no_request_has_is_refused() -> None:
    with pytest.raises(RequestError, match="temprature"):
        check({"temprature": 0.5})
