from __future__ import annotations

import copy
import json
import math
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dsv4nb.errors import RequestError
from dsv4nb.rounds import Round, Rounds

MakeRound = Callable[..., Round]


@pytest.fixture
def pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is used of pandas."""

    class Frame:
        def __init__(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
            self.rows, self.columns = rows, columns

    class Pandas:
        DataFrame = Frame

    monkeypatch.setitem(sys.modules, "pandas", Pandas)


def test_replies_are_pooled_and_parts_taken_without_losing_the_type(round_of: MakeRound) -> None:
    one, two = Rounds([round_of(5, 1)]), Rounds([round_of(5, 2), round_of(5, 3)])
    pooled = one + two
    assert type(pooled) is Rounds and [r.accepts for r in pooled] == [1, 2, 3]
    assert type(pooled[1:]) is Rounds and pooled[1:] == two and pooled[::-1][0] is two[1]
    assert isinstance(pooled[-1], Round)
    plain = tuple(one)
    assert type(plain + two) is Rounds and plain + two == pooled
    assert type(sum([one, two], Rounds())) is Rounds
    assert pooled[1:].totals == two.totals
    no_rounds: Any = [1]
    with pytest.raises(TypeError):
        _ = one + no_rounds


def test_rounds_are_copied_and_pickled(round_of: MakeRound) -> None:
    rounds = Rounds([round_of(5, 1)])
    for again in (copy.deepcopy(rounds), pickle.loads(pickle.dumps(rounds))):
        assert type(again) is Rounds and again == rounds


def test_j20_a_frame_has_a_row_per_round(round_of: MakeRound, pandas: None) -> None:
    ended = round_of(5, 5, stop="eos", emitted=2, number=1, start=13)
    rounds = Rounds([round_of(3, 2, ms={"draft": 1.0, "total": 4.0}, plain_ms=3.0), ended, round_of(0, 0)])
    frame = rounds.to_frame()
    first, second, third = frame.rows
    assert set(first) == set(frame.columns)
    assert [row["reply"] for row in frame.rows] == [0, 0, 1]
    assert (first["round"], first["start"], first["pending"], first["pending_id"]) == (0, 10, "p", 1)
    assert (first["t_batch"], first["t_cap"], first["verified"], first["accepts"], first["emitted"]) == (4, 4, 3, 2, 3)
    assert first["drafts"] == ("d0", "d1", "d2", "d3", "d4") and first["conf"] == (0.5,) * 5
    assert (first["next"], first["next_id"], second["next"], second["next_id"]) == ("n", 7, None, None)
    assert (first["draft_ms"], first["verify_ms"], first["total_ms"], first["plain_ms"]) == (1.0, None, 4.0, 3.0)
    assert (first["stop"], second["stop"], third["verified"]) == (None, "eos", 0)


def test_j20_a_frame_has_a_row_per_draft(round_of: MakeRound, pandas: None) -> None:
    frame = Rounds([round_of(3, 1), round_of(5, 5, number=1, block=2)]).drafts_frame()
    assert set(frame.rows[0]) == set(frame.columns) and len(frame.rows) == 7
    assert [row["draft"] for row in frame.rows] == [1, 2, 3, 4, 5, 1, 2]
    assert [row["status"] for row in frame.rows[:5]] == [
        "accepted", "rejected", "unreached", "not_verified", "not_verified",
    ]  # fmt: skip
    assert frame.rows[1]["target_choice"] == 7 and frame.rows[6]["round"] == 1


def test_frames_without_pandas_name_the_way_out(round_of: MakeRound, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    rounds = Rounds([round_of(5, 1)])
    for frame in (rounds.to_frame, rounds.drafts_frame, rounds.sweep().to_frame):
        with pytest.raises(RequestError, match="pip install pandas"):
            frame()


def test_a_finished_reply_is_data(round_of: MakeRound) -> None:
    rounds = Rounds(
        [
            round_of(3, 2, ms={"draft": 1.25, "total": 4.0}, plain_ms=3.5, window_reason="slot, tau 0.5: „ü“"),
            round_of(5, 5, stop="eos", emitted=2, number=1, confs=[None, 0.25], mode="rejection"),
            round_of(0, 0, cut=True, stop="budget", number=2, proposal="greedy"),
        ]
    )
    assert Rounds.from_json(rounds.to_json()) == rounds
    assert Rounds.from_dicts(json.loads(json.dumps(rounds.to_dicts()))) == rounds
    assert type(Rounds.from_json(rounds.to_json())) is Rounds
    assert Rounds.from_json(Rounds().to_json()) == Rounds()
    # every field of the records, and nothing else
    (raw, *_) = rounds.to_dicts()
    assert set(raw) == set(Round.__slots__)
    assert set(raw["drafts"][0]) == set(type(rounds[0].drafts[0]).__slots__)


def test_numbers_that_json_cannot_say_never_appear(round_of: MakeRound) -> None:
    plain = round_of(5, 1)
    odd = replace(plain.drafts[0], conf=math.nan, conf_logit=math.nan, margin=math.inf, survival=-math.inf)
    text = Rounds([replace(plain, drafts=(odd, *plain.drafts[1:]))]).to_json()
    assert "NaN" not in text and "Infinity" not in text
    (again,) = Rounds.from_json(text)
    assert again.drafts[0].conf is None and again.drafts[0].conf_logit is None
    assert again.drafts[0].margin == sys.float_info.max and again.drafts[0].survival == -sys.float_info.max


def _broken(**change: Any) -> Callable[[dict[str, Any]], object]:
    return lambda raw: raw | change


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        (_broken(accepts=-1), "accepts", "accepts of the round is -1"),
        (_broken(accepts=4), "accepts", "4 accepted of 3 verified of 5 drafts"),
        (_broken(t_batch=7), "accepts", "2 accepted of 6 verified of 5 drafts"),
        (_broken(t_batch=True), "t_batch", "t_batch of the round is True"),
        (_broken(kind="gift"), "kind", "'correction' or 'bonus'"),
        (_broken(stop="eof"), "stop", "or null"),
        (_broken(mode=["exact"]), "mode", "'exact' or 'rejection'"),
        (_broken(plain_ms=math.nan), "plain_ms", "finite"),
        (_broken(ms={"total": "1"}), "ms", "finite"),
        (_broken(pending=None), "pending", "an object"),
        (_broken(next={"id": 1}), "next", "next has id"),
        (_broken(drafts=[3]), r"drafts\[0\]", "is 3"),
        (_broken(extra=1), "the round", "extra"),
        (lambda raw: {k: v for k, v in raw.items() if k != "stop"}, "the round", "it must be an object with"),
        (lambda raw: 5, "the round", "is 5"),
    ],
)
def test_what_is_no_round_is_refused_by_name(
    round_of: MakeRound, change: Callable[[dict[str, Any]], object], param: str, says: str
) -> None:
    good = Rounds([round_of(3, 2)]).to_dicts()[0]
    with pytest.raises(RequestError, match=says) as refused:
        Rounds.from_json(json.dumps([good, change(good)]))
    assert str(refused.value).startswith("rounds[1]: ")
    assert refused.value.param is not None and refused.value.param == param.replace("\\", "")


@pytest.mark.parametrize("text", ["{", "{}", "null", None])
def test_what_is_no_list_of_rounds_is_refused(text: Any) -> None:
    with pytest.raises(RequestError, match="the rounds"):
        Rounds.from_json(text)
