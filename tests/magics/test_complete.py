"""What Tab goes on with, as IPython itself is asked."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter

from dsv4nb.magics.arguments import COMMANDS
from dsv4nb.magics.complete import complete
from dsv4nb.magics.options import CELL, LOAD, NOTEBOOK, each


@pytest.fixture(params=[False, True], ids=["plain", "jedi"])
def tab(ip: Any, request: Any, fake: Any) -> Iterator[Any]:
    """Complete a cell at its end, or at the end of its first line; with and without jedi, and by the older call."""
    ip.Completer.use_jedi = request.param
    model = fake()
    ip.user_ns.update(c=model.chat(), n=3, reply=model.generate("hi"), add=lambda: None)

    def complete(line: str, body: str = "") -> list[str]:
        with provisionalcompleter():
            found = list(ip.Completer.completions(f"{line}{body}", len(line)))
        for one in found:  # the word at the cursor is replaced, the whole of it
            assert one.text.startswith(line[one.start : one.end]) and one.end == len(line), one
            assert line[: one.start].endswith((" ", ",", "\n")) or "dsv4" not in line, one
        words = [one.text for one in found]
        if "\n" not in line and "dsv4" in line:
            with warnings.catch_warnings(action="ignore"):  # it is to be deprecated, and still what terminals ask
                assert sorted(ip.complete(None, line, len(line))[1]) == sorted(words)
        return words

    yield complete


def test_commands(tab: Any) -> None:
    assert sorted(tab("%dsv4 ")) == sorted(COMMANDS)
    assert tab("%dsv4 rep") == ["replay"]
    assert sorted(tab("%dsv4 un")) == ["unload"] and tab("  %dsv4 s") == ["set", "show", "spec", "status"]


def test_options_of_each_command(tab: Any) -> None:
    assert set(tab("%dsv4 load toy --")) == {"--help", "--as", "--no-drafter", *(one.flag for one in each(LOAD))}
    assert tab("%dsv4 load toy --no") == ["--no-drafter"]
    assert set(tab("%dsv4 bench --")) == {"--help", "--new", "--runs", "--temperature"}
    assert set(tab("%dsv4 doctor --s")) == {"--seconds"}


def test_options_of_a_cell(tab: Any) -> None:
    flags = {"--help", "--no-stream", "--no-spec", "--no-thinking"}
    flags |= {one.flag for table in (CELL, NOTEBOOK) for one in each(table)}
    assert set(tab("%%dsv4 --", "\nbody")) == flags
    assert set(tab("%%dsv4 ", "\nbody")) == flags
    assert tab("%%dsv4 --temp", "\nbody") == ["--temperature"]
    assert tab("%%dsv4 --with n --wi", "\nx") == ["--with"] and tab("%%dsv4 --seed 3 --see") == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%dsv4 caps ", ["m"]),
        ("%dsv4 unload ", ["m"]),
        ("%dsv4 replay --model ", ["m"]),
        ("%dsv4 replay re", ["reply"]),
        ("%dsv4 rounds ", ["c", "reply"]),
        ("%dsv4 show ", ["c"]),
        ("%%dsv4 --model ", ["m"]),
        ("%%dsv4 --chat ", ["c"]),
        ("%%dsv4 --tools ", ["add"]),
        ("%%dsv4 --tools add,a", ["add"]),
        ("%%dsv4 --with r", ["reply"]),
        ("%%dsv4 --sampler ", ["gumbel", "inverse_cdf"]),
        ("%%dsv4 --effort m", ["max", "medium"]),
        ("%%dsv4 --penalty-scope g", ["generated"]),
        ("%%dsv4 --spec-window a", ["auto"]),
        ("%dsv4 set temp", ["temperature"]),
        ("%dsv4 set thinking ", ["off", "on"]),
        ("%dsv4 set spec_mode r", ["rejection"]),
        ("%dsv4 set --no-t", ["--no-thinking"]),
        ("%dsv4 set --reset temp", ["temperature"]),
        ("%dsv4 set --temperature 0 --see", ["--seed"]),
    ],
)
def test_values_and_variables_of_the_right_kind(tab: Any, line: str, words: list[str]) -> None:
    assert sorted(tab(line)) == words


@pytest.mark.parametrize("line", ["nothing ", "status x", "load toy x", "caps m ", "set nothing "])
def test_nothing_is_made_up(line: str) -> None:
    assert complete(line, {"m": 3}, is_cell=False)[1] in ([], ["--help"])


def test_a_checkpoint_is_toy_or_a_folder(tab: Any, tmp_path: Path) -> None:
    (tmp_path / "flash").mkdir()
    (tmp_path / "file").touch()
    assert "toy" in tab("%dsv4 load ")
    assert tab(f"%dsv4 load {tmp_path}/f") == [f"{tmp_path}/flash/"]


def test_other_lines_are_left_alone(tab: Any) -> None:
    assert "--temperature" not in tab("%%dsv4\n--temp") and tab("%%dsv4\nan --temp") == []
    assert "import" in tab("impor")


def test_completion_goes_with_the_extension(ip: Any, cells: Any) -> None:
    assert len(ip.Completer.custom_matchers) == 1
    cells.run("%unload_ext dsv4nb")
    assert ip.Completer.custom_matchers == []
    cells.run("%load_ext dsv4nb")


@pytest.mark.parametrize("line", ["%dsv4?", "%%dsv4?"])
def test_help_is_the_docstring(cells: Any, line: str, capsys: Any) -> None:
    cells.run(line)
    said = capsys.readouterr().out
    assert "Load a model and ask it, from cells." in said
    for word in (*COMMANDS, "--chat", "--with", "--schema"):
        assert word in said


@pytest.mark.parametrize("word", COMMANDS)
def test_every_command_tells_its_options(cells: Any, word: str, capsys: Any) -> None:
    cells.run(f"%dsv4 {word} --help")
    assert capsys.readouterr().out.startswith(f"usage: %dsv4 {word}")
