from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4nb.errors import EngineError, ModelClosed, RequestError
from dsv4nb.model import Model, load
from dsv4nb.session.batch import WORTH, filled, rows_of, shared_beginnings
from dsv4nb.session.reuse import Policy, common_prefix

MakeModel = Callable[..., Any]

CONTEXT = " ".join(f"Anna went from Paris to Rome on {day}." for day in ("Monday", "Tuesday", "Friday") * 6)
QUESTIONS = ["What is 12 + 30?", "What is the capital of France?", "What is 12 + 31?", "Hi!", "What is 12 + 30?"]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load("toy", name="batch") as model:
        yield model


def test_a26_no_prompts_no_results_and_order_is_kept(model: Model) -> None:
    assert model.generate_batch([]) == []
    seen: list[int] = []
    replies = model.generate_batch(QUESTIONS, temperature=0, on_result=lambda i, reply: seen.append(i))
    assert [reply.text for reply in replies] == [model.generate(q, temperature=0).text for q in QUESTIONS]
    assert seen == [0, 1, 2, 3, 4]


def test_a27_each_row_has_its_own_values_and_equals_its_solo_run(model: Model) -> None:
    configs = [{"seed": i, "temperature": 1.5, "max_new": 4 + i, "top_k": 3 * i} for i in range(5)]
    rows = model.generate_batch(QUESTIONS, configs, thinking=True)
    for question, config, row in zip(QUESTIONS, configs, rows, strict=True):
        alone = model.generate(question, thinking=True, **config)
        assert (row.ids, row.config) == (alone.ids, alone.config)


def test_what_prompts_share_is_computed_once(model: Model) -> None:
    model.cache.clear()
    model.cache.policy = Policy()
    prompts = [f"{CONTEXT} {question}" for question in QUESTIONS[:4]]
    rows = model.generate_batch(prompts, temperature=0)
    shared = len(model.encode(CONTEXT))
    assert rows[0].done.n_cached == 0
    assert all(row.done.n_cached >= shared for row in rows[1:])
    assert [row.ids for row in rows] == [model.generate(p, temperature=0).ids for p in prompts]


def test_a_refused_row_refuses_all_and_nothing_runs(make_model: MakeModel) -> None:
    model = make_model("ok")
    for prompts, configs, says in (
        (["a", ""], None, "empty"),
        (["a", "b"], [{}], "configs has 1 entries for 2 prompts"),
        ("ab", None, "prompts is str"),
        (["a", "b"], [{}, {"temperature": "x"}], "temperature"),
        (["a", "b"], [{}, {"tempratur": 1}], "did you mean 'temperature'"),
    ):
        with pytest.raises(RequestError, match=says):
            model.generate_batch(prompts, configs)
    assert model.engine.calls["prefill"] == 0
    messages = [{"role": "user", "content": "hi"}]
    assert [r.text for r in model.generate_batch(["a", messages])] == ["ok", "ok"]


def test_a_run_that_fails_cancels_those_behind_it(make_model: MakeModel) -> None:
    model = make_model("word " * 50, prefill_faults={1: RuntimeError("lost")}, delay_s=0.001)
    with pytest.raises(EngineError, match="lost"):
        model.generate_batch(["a", "b", "c", "d"])
    assert model.generate("hi", max_new=1).ids and model.queue == []


def test_marks_are_where_later_prompts_part(model: Model) -> None:
    a, b, c = [1] * 20 + [2, 3], [1] * 20 + [4], [1] * 17 + [5]
    assert shared_beginnings([a, b, c]) == [(17, 20), (17,), ()]
    assert shared_beginnings([[1, 2], [1, 3]]) == [(), ()]  # too short to be worth it
    assert shared_beginnings([a, a]) == [(), ()]  # the whole prompt: its own anchor serves


@given(st.lists(st.lists(st.integers(0, 2), max_size=30), max_size=12))
def test_marks_are_those_of_every_pair(parts: list[list[int]]) -> None:
    prompts = [[7] * 14 + part for part in parts]
    for i, marks in enumerate(shared_beginnings(prompts)):
        lengths = {common_prefix(prompts[i], later) for later in prompts[i + 1 :]}
        assert marks == tuple(sorted(n for n in lengths if WORTH <= n < len(prompts[i])))


def test_marks_of_thousands_of_prompts_take_no_time() -> None:
    prompts = [[*range(500), i % 7, i] for i in range(4_000)]
    began = time.process_time()
    marks = shared_beginnings(prompts)
    assert time.process_time() - began < 2
    assert marks[0] == (500, 501) and marks[-1] == ()


class Frame:
    """Looks like a data frame."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.columns = rows, list(rows[0])

    def to_dict(self, kind: str) -> list[dict[str, Any]]:
        assert kind == "records"
        return self.rows

    def assign(self, **columns: list[Any]) -> Frame:
        return Frame([{**row, **{k: v[i] for k, v in columns.items()}} for i, row in enumerate(self.rows)])


def test_map_asks_about_each_row_and_returns_what_it_was_given(model: Model) -> None:
    rows = [{"country": "France"}, {"country": "Japan"}]
    out = model.map(rows, "What is the capital of {country}?", temperature=0)
    assert [row["reply"] for row in out] == ["The capital of France is Paris.", "The capital of Japan is Tokyo."]
    assert out[0]["country"] == "France" and out[0]["reply_stop_reason"] == "stop" and rows[0].keys() == {"country"}
    frame = model.map(Frame(rows), "What is the capital of {country}?", column="capital", temperature=0)
    assert isinstance(frame, Frame) and frame.rows[1]["capital"] == "The capital of Japan is Tokyo."
    assert model.map([], "x") == []


@pytest.mark.parametrize(
    ("rows", "template", "says"),
    [
        ([{"a": 1}], "{b}", "row 0 has no column 'b'; it has a"),
        ([{"a": 1}], "{a.real}", "must be the name of a column"),
        ([{"a": 1}], "{a", "cannot be read"),
        ([{"a": 1}], "", "template is ''"),
        ([1], "x", "row 0 is int"),
        ({"a": 1}, "x", "rows is dict"),
        ("abc", "x", "rows is str"),
    ],
    ids=str,
)
def test_a_template_that_does_not_fit_is_refused(rows: Any, template: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        filled(template, rows_of(rows))


def test_braces_of_values_and_of_the_template_stay() -> None:
    assert filled("{{x}} {a}", [{"a": "{b}"}]) == ["{x} {b}"]


def test_the_policy_is_checked_where_it_is_set_and_the_numbers_can_be_read(model: Model) -> None:
    with pytest.raises(RequestError, match="policy is 'x'; it must be") as caught:
        model.cache.policy = "x"  # type: ignore[assignment]
    assert caught.value.param == "policy"
    model.cache.clear()
    assert "anchors     none" in str(model.cache.stats())
    model.chat(temperature=0).send("Hi!")
    stats = model.cache.stats()
    assert "reset" in str(stats) and "prompt tokens not computed again" in str(stats)
    assert stats._repr_html_().count("<tr>") == 4


def test_clearing_the_cache_waits_for_the_runs_before_it(make_model: MakeModel) -> None:
    model = make_model("word " * 60, delay_s=0.002)
    chat = model.chat()
    chat.send("hi")
    running = chat.submit("more")
    model.cache.clear()
    assert running.state == "done" and model.cache.stats().anchors == ()
    assert chat.send("again").done.reuse.kind == "reset"


def test_who_listens_for_an_end_may_clear_the_cache_and_save(make_model: MakeModel) -> None:
    model = make_model("ok")
    seen: list[int] = []

    def listen(*_: object) -> None:
        model.cache.clear()
        seen.append(len(model.cache.stats().anchors))

    assert model.start(model.prepare("hi"), listen).wait(2) and seen == [0]
    model.close()
    with pytest.raises(ModelClosed):
        model.cache.clear()
