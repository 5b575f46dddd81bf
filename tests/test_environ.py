from __future__ import annotations

import os
from pathlib import Path

import pytest

import dsv4nb
from dsv4nb import environ
from dsv4nb.errors import RequestError
from dsv4nb.model import load


@pytest.mark.parametrize(
    ("text", "ids"), [(" 1 , 0 ", (1, 0)), ("0", (0,)), ("0,1,2,3", (0, 1, 2, 3)), (" cpu ", "cpu")]
)
def test_m04_a_list_of_devices_is_read(monkeypatch: pytest.MonkeyPatch, text: str, ids: object) -> None:
    monkeypatch.setenv("DSV4NB_DEVICES", text)
    assert environ.devices() == ids
    monkeypatch.delenv("DSV4NB_DEVICES")
    assert environ.devices() is None


@pytest.mark.parametrize("text", ["", "a", "0,,1", "0;1", "-1", "0,0", "cpu,0", "1.0", "٣", " "])
def test_m04_a_list_that_cannot_be_read_is_named_with_its_text(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DSV4NB_DEVICES", text)
    with pytest.raises(RequestError) as caught:
        load("toy")
    assert "DSV4NB_DEVICES" in str(caught.value) and repr(text) in str(caught.value)
    assert caught.value.param == "DSV4NB_DEVICES"


def test_m04_the_keyword_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4NB_DEVICES", "broken")
    load("toy", devices="cpu").close()
    load("toy", devices=["cpu"]).close()
    for given in ("0,1", (0, 1)):
        with pytest.raises(RequestError, match=r"devices is 0,1; torch .* here; devices='cpu' runs everywhere"):
            load("toy", devices=given)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RequestError, match=r"devices is 0; torch .* here; devices='cpu' runs everywhere"):
        load("toy", devices=0)
    with pytest.raises(RequestError, match=r"devices is \(0, 0\); each GPU can be named once"):
        load("toy", devices=(0, 0))


@pytest.mark.parametrize("text", ["abc", "0", "-1", "", "1e3", "12.5"])
def test_m07_a_bad_max_seq_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DSV4NB_MAX_SEQ", text)
    with pytest.raises(RequestError, match="DSV4NB_MAX_SEQ") as caught:
        load("toy")
    assert repr(text) in str(caught.value)


def test_m07_keyword_over_environment_over_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    with load("toy") as model:
        assert model.caps.context_length == model.max_seq == model.info.max_seq_declared == 4096
    monkeypatch.setenv("DSV4NB_MAX_SEQ", " 1024 ")
    with load("toy") as model:
        assert model.caps.context_length == model.max_seq == 1024
    with load("toy", max_seq=512) as model:
        assert model.max_seq == 512
    monkeypatch.setenv("DSV4NB_MAX_SEQ", "1000000")
    with pytest.raises(RequestError, match="DSV4NB_MAX_SEQ is 1000000; it must be an integer from 98 to 4096"):
        load("toy")


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({"COLAB_RELEASE_TAG": "x", "JPY_PARENT_PID": "1"}, "colab"),
        ({"VSCODE_CWD": "/"}, "vscode"),
        ({"JPY_SESSION_NAME": "a.ipynb"}, "jupyter"),
        ({"JPY_PARENT_PID": "1"}, "jupyter"),
        ({"HOME": "/"}, ""),
    ],
)
def test_what_started_the_kernel(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], host: str) -> None:
    monkeypatch.setattr("os.environ", variables)
    assert environ.host() == host


def test_only_one_module_reads_the_environment() -> None:
    package = Path(dsv4nb.__file__).parent
    readers = [p.relative_to(package).as_posix() for p in package.rglob("*.py") if "os.environ" in p.read_text("utf-8")]
    assert readers == ["environ.py"]


def test_a_variable_is_what_it_was_behind_what_it_was_set_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "here"):
        if before is None:
            monkeypatch.delenv("DSV4NB_OTHERS", raising=False)
        else:
            monkeypatch.setenv("DSV4NB_OTHERS", before)
        with pytest.raises(ZeroDivisionError), environ.variable("DSV4NB_OTHERS", "inside"):
            assert os.environ["DSV4NB_OTHERS"] == "inside"
            raise ZeroDivisionError
        assert os.environ.get("DSV4NB_OTHERS") == before
