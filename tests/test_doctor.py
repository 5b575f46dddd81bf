"""The doctor: green where the promises hold, and red for each of them where it is broken."""

from __future__ import annotations

import importlib
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import dsv4nb
from dsv4nb import doctor
from dsv4nb.doctor import Check, Report, caches, examine, replies, rows, sampling
from dsv4nb.doctor.machine import facts, panels
from dsv4nb.doctor.plan import Compared, Plan, carry_out, counted
from dsv4nb.engine import sampler
from dsv4nb.engine.cpu import CpuEngine
from dsv4nb.engine.speculate import Choice
from dsv4nb.errors import DrafterFault, EngineError, ModelClosed, RequestError
from dsv4nb.handle import Model
from dsv4nb.model import load
from dsv4nb.session.chat import Chat
from dsv4nb.session.choosing import Chooser
from dsv4nb.session.emission import Emission
from dsv4nb.testing.fake_engine import FakeEngine
from dsv4nb.testing.scripted_drafter import ScriptedDrafter, drafted_model

NAMES = ["sampler", "batch rows", "rollback", "cached prompts", "speculation", "replay"]


def says(ids: tuple[int, ...]) -> int:
    """What the fake models say behind `ids`: it depends on all of them, and is not the end."""
    return 300 + hash(ids[-200:]) % 500


def drafts(ids: tuple[int, ...]) -> list[int]:
    """Right, but for the fourth draft."""
    drafted: list[int] = []
    for slot in range(5):
        drafted.append(says((*ids, *drafted)) + (slot == 3))
    return drafted


fakes = importlib.import_module("dsv4nb.testing.fake_model")  # the package has a function of this name


class Pure(FakeEngine):
    """An engine whose caches are what its ids make them, however they came in."""

    def dump(self, snapshot: Any) -> Any:
        return {**super().dump(snapshot), "n_prompt": np.zeros(1, np.int32)}


@pytest.fixture
def make_fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Model]]:
    made: list[Model] = []

    def make(engine: type[FakeEngine] = Pure, **options: Any) -> Model:
        monkeypatch.setattr(fakes, "FakeEngine", engine)
        made.append(fakes.fake_model(next_id=says, **options))
        return made[-1]

    yield make
    for model in made:
        model.close()


@pytest.fixture(scope="module")
def toy() -> Iterator[Model]:
    with load("toy", name="doctor") as made:  # an engine that no other test holds blocks of
        yield made


def named(report: Report, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


def first(plan: Plan, model: Model, n: int = 2) -> Check:
    """Carry out the first comparisons of a check."""
    return carry_out(replace(plan, comparisons=lambda m: plan.comparisons(m)[:n]), model, float("inf"))


# green


def test_m26_the_bundled_model_keeps_all_promises(toy: Model) -> None:
    report = examine(toy, seconds=3)
    assert [check.name for check in report.checks] == NAMES
    assert report.ok, report
    has_drafter = toy.limits.spec is not None
    assert named(report, "speculation").result == ("ok" if has_drafter else "skipped")
    assert toy.engine.blocks_in_use == 0


def test_m26_speculation_of_a_scripted_drafter_is_compared_with_plain_decoding() -> None:
    with drafted_model("toy", ScriptedDrafter(0.7, (0.9, 0.8, 0.6, 0.5, 0.3))) as model:
        check = first(replies.SPECULATION, model)
    assert check.result == "ok", check
    assert "2 replies" in check.compared and "verified drafts" in check.compared


def test_a_whole_report(make_fake: Any) -> None:
    model = make_fake(drafts=drafts)
    report = examine(model)
    assert report.ok, report
    assert {check.result for check in report.checks} == {"ok"}
    told = {check.name: check.compared for check in report.checks}
    assert "3 philox vectors, 6 keyed uniform numbers, 4 greedy ties" in told["sampler"]
    assert told["batch rows"].endswith(": 12 positions, 72 rows")
    assert told["rollback"].endswith(": 12 rejections, 42 rejected rows")
    assert "2 live starts, 2 anchor starts, 2 exact starts, 2 host starts, 760 cached tokens" in told["cached prompts"]
    assert "12 replies, 288 tokens" in told["speculation"]
    assert told["replay"].endswith(": 4 recipes, 96 tokens")


def test_without_a_drafter_speculation_is_skipped_and_says_so(make_fake: Any) -> None:
    report = examine(make_fake())
    check = named(report, "speculation")
    assert (check.result, check.detail) == ("skipped", "no drafter: the checkpoint has no drafter")
    assert report.ok and "5 ok, 1 skipped" in report.title


def test_prompts_in_chunks_are_no_promise_of_bits_and_it_says_so(make_fake: Any) -> None:
    model = make_fake()
    model._parts = replace(model._parts, limits=replace(model.limits, prefill="fast"))
    check = named(examine(model), "cached prompts")
    assert check.result == "skipped"
    assert check.detail.startswith("prefill='fast' adds in an order that depends on where the cached beginning ends")


# red


def test_a_row_that_differs_in_one_bit_in_a_batch_is_found(toy: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = CpuEngine.forward_rows

    def off(self: CpuEngine, state: Any, tokens: Sequence[int]) -> Any:
        found = forward(self, state, tokens)
        if len(tokens) > 4:
            found[4].view(np.uint32)[17] ^= 1
        return found

    monkeypatch.setattr(CpuEngine, "forward_rows", off)
    check = first(rows.BATCHES, toy)
    assert check.result == "failed"
    assert check.detail.startswith("2 of 2 comparisons differ; the first: position 129, row 5 of 6: 1 of ")
    assert "the first that of id 17" in check.detail and "above the second" in check.detail


@pytest.mark.parametrize("back", [1, 3])
def test_a_rollback_that_changes_a_ring_row_is_found(toy: Model, monkeypatch: pytest.MonkeyPatch, back: int) -> None:
    commit = CpuEngine.commit

    def off(self: CpuEngine, state: Any, n: int) -> None:
        is_rejecting = state.pending > n
        commit(self, state, n)
        if is_rejecting:
            ring = state.layers[2].window
            ring[(state.pos - back) % len(ring), 5] += 1

    monkeypatch.setattr(CpuEngine, "commit", off)
    check = first(rows.REJECTIONS, toy)
    assert check.result == "failed"
    assert "position 125, 2 of 6 rows accepted: row " in check.detail and "differs" in check.detail


def test_rejected_rows_that_are_seen_later_are_found(make_fake: Any) -> None:
    class Lingering(Pure):
        """What was rejected is still there once more rows follow, and is in no snapshot."""

        def commit(self, state: Any, n: int) -> None:
            rejected = state.rows[n:]
            super().commit(state, n)
            state.lingering = tuple(rejected)

        def _best(self, state: Any, ahead: tuple[int, ...]) -> int:
            return says((*getattr(state, "lingering", ()), *state.ledger, *ahead))

    report = examine(make_fake(Lingering))
    check = named(report, "rollback")
    assert check.result == "failed" and "row 1 behind them" in check.detail
    assert not report.ok


def test_h21_a_restored_state_that_differs_is_found(toy: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    restore = CpuEngine.restore

    def off(self: CpuEngine, snapshot: Any) -> Any:
        state = restore(self, snapshot)
        ring = state.layers[0].window
        with torch.inference_mode():
            ring[(state.pos - 1) % len(ring)] += 1e-3
        return state

    monkeypatch.setattr(CpuEngine, "restore", off)
    check = first(caches.PLAN, toy, 1)
    assert check.result == "failed"
    assert "live, 136 of 147 prompt tokens cached, row behind position 146: " in check.detail


def test_a_start_that_reuses_nothing_is_found(make_fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def starts_with(ids: Sequence[int], prefix: Sequence[int]) -> bool:
        return False

    monkeypatch.setattr("dsv4nb.session.reuse.starts_with", starts_with)
    check = carry_out(caches.PLAN, make_fake(), float("inf"))
    assert check.result == "failed"
    assert "started by 'reset', not 'anchor'" in check.detail


def test_drafts_that_are_accepted_unseen_are_found(make_fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Chooser.decide

    def off(self: Chooser, row: Any, position: int, ahead: Sequence[int], draft: int | None) -> Choice:
        return decide(self, row, position, ahead, draft) if draft is None else Choice(token=draft)

    monkeypatch.setattr(Chooser, "decide", off)
    report = examine(make_fake(drafts=drafts))
    check = named(report, "speculation")
    assert check.result == "failed"
    # the drafts of the first round stand behind the first token; the fourth is wrong
    assert "'What is the capital of France?', temperature 0.0" in check.detail
    assert "token 5, position " in check.detail and "the best logit is 60 above the second" in check.detail
    assert not report.ok and "1 failed" in report.title


def test_another_stop_reason_is_found(make_fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = Emission.accept

    def off(self: Emission, tokens: Sequence[int], *rest: Any) -> int:
        end = accept(self, tokens, *rest)
        if len(tokens) > 1 and self.stop_reason == "length":
            self.stop_reason = "stop"
        return end

    monkeypatch.setattr(Emission, "accept", off)
    check = named(examine(make_fake(drafts=drafts)), "speculation")
    assert check.result == "failed"
    assert "the ids are the same; the stop reasons are 'stop' and 'length'" in check.detail


def test_a_drafter_that_is_never_asked_proves_nothing(make_fake: Any) -> None:
    model = make_fake(drafts=drafts)
    model._parts.server.speculator.fault = "its numbers broke"
    check = named(examine(model), "speculation")
    assert check.result == "failed" and "the drafter was given up: its numbers broke" in check.detail
    model._parts.server.speculator.fault = ""

    def gives_up(ids: tuple[int, ...]) -> list[int]:
        raise DrafterFault("its numbers broke")

    model = make_fake(drafts=gives_up)
    check = named(examine(model), "speculation")
    assert check.result == "failed" and "nothing was speculated: plain: its numbers broke" in check.detail


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("_MULTIPLIERS", (np.uint64(0xD2511F53), np.uint64(0xCD9E8D59)), "philox of counter 00000000"),
        ("_KEY_STEPS", (0x9E3779B9, 0xBB67AE87), "philox of counter 00000000"),
        ("_ROUNDS", 9, "philox of counter 00000000"),
        ("_MASK_64", 2**63 - 1, "the keyed uniform number of seed 0, position 0: "),
        ("_LARGEST_U", np.float32(1.0), "the arrival times of the words"),
    ],
)
def test_a_constant_of_the_sampler_that_was_changed_is_found(
    make_fake: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, told: str
) -> None:
    monkeypatch.setattr(sampler, name, value)
    check = carry_out(sampling.PLAN, make_fake(), float("inf"))
    assert check.result == "failed" and told in check.detail


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"position": 1}, "gumbel, seed 7, position 0: id 27, not 13"),
        ({"stream": 1}, "gumbel, seed 7, position 0: id "),
    ],
)
def test_m41_draws_by_other_keys_are_found(
    make_fake: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, int], told: str
) -> None:
    def off(row: Any, config: Any, position: int) -> int:
        shifted = position + change.get("position", 0)
        return sampler.choose(row, config, shifted, change.get("stream", 0))

    monkeypatch.setattr(sampling, "choose", off)
    check = carry_out(sampling.PLAN, make_fake(), float("inf"))
    assert check.result == "failed" and told in check.detail


def test_m41_a_tie_that_goes_to_another_id_is_found(make_fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def last(row: Any, config: Any, position: int) -> int:
        return int(np.flatnonzero(row == row.max())[-1]) if config.is_greedy else sampler.choose(row, config, position)

    monkeypatch.setattr(sampling, "choose", last)
    check = carry_out(sampling.PLAN, make_fake(), float("inf"))
    assert check.result == "failed" and "greedy over [1, 3, 3, 2, 3]: id 4, not 1" in check.detail


def test_a_reply_that_does_not_come_again_is_found(make_fake: Any) -> None:
    class Forgetful(Pure):
        def _best(self, state: Any, ahead: tuple[int, ...]) -> int:
            return says((*state.ledger, *ahead, self.calls["new_state"]))

    check = named(examine(make_fake(Forgetful)), "replay")
    assert check.result == "failed" and "the replay has 24 ids" in check.detail


# how it goes


def test_a_check_that_raises_is_a_line_and_the_others_go_on(make_fake: Any) -> None:
    class Broken(Pure):
        def dump(self, snapshot: Any) -> Any:
            raise EngineError("nothing can be dumped")

    report = examine(make_fake(Broken))
    results = {check.name: check.result for check in report.checks}
    assert (results["rollback"], results["batch rows"], results["replay"]) == ("failed", "ok", "ok")
    assert named(report, "rollback").detail == "EngineError: nothing can be dumped"


def test_an_error_after_a_difference_does_not_hide_it(make_fake: Any) -> None:
    def comparisons(model: Model) -> list[Callable[[], Compared]]:
        def fail() -> Compared:
            raise EngineError("gone")

        return [lambda: Compared(counts={"row": 1}, difference="row 3"), fail]

    plan = Plan(name="p", told="a against b", weight=1, comparisons=comparisons)
    check = carry_out(plan, make_fake(), float("inf"))
    assert (check.result, check.compared) == ("failed", "a against b: 1 row; 1 of 2 comparisons")
    assert check.detail == "EngineError: gone (after a difference: row 3)"


def test_what_the_time_does_not_suffice_for_is_not_begun_and_said(make_fake: Any) -> None:
    started = time.monotonic()
    report = examine(make_fake(delay_s=0.02, drafts=drafts), seconds=2.0)
    assert time.monotonic() - started < 2.0 + 1.5  # what had begun came to its end
    check = named(report, "rollback")
    assert check.result == "ok" and " of 12 comparisons in the time there was" in check.compared


def test_a_report_of_no_comparisons_is_not_ok(make_fake: Any) -> None:
    report = examine(make_fake(), seconds=1e-9)
    assert {check.result for check in report.checks} == {"skipped"} and not report.ok
    assert named(report, "replay").detail == "no time was left; give it more seconds"


def test_a_model_without_room_is_not_compared(make_fake: Any) -> None:
    report = examine(make_fake(max_seq=20))
    assert named(report, "rollback").result == "ok"  # at the positions that fit
    assert named(report, "cached prompts").detail == (
        "max_seq 20 has no room for a prompt of 62 tokens and two replies"
    )


@pytest.mark.parametrize("seconds", [0, -1, "60", None, True, float("nan")])
def test_seconds_that_are_none_are_refused(make_fake: Any, seconds: Any) -> None:
    with pytest.raises(RequestError, match=r"seconds is .*; it must be a number above 0"):
        examine(make_fake(), seconds=seconds)


def test_a_closed_model_is_refused(make_fake: Any) -> None:
    model = make_fake()
    model.close()
    with pytest.raises(ModelClosed):
        examine(model)


def test_the_model_is_left_as_it_was(make_fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_fake(drafts=drafts)
    chat: Chat = model.chat()
    chat.send("hello", max_new=8, seed=1)
    before = (model.cache.stats(), model.spec.config, model.spec.draft_ms, model.engine.blocks_in_use)
    state = random.getstate()

    def drawn(bits: int) -> int:
        raise AssertionError("a seed was drawn")

    monkeypatch.setattr(secrets, "randbits", drawn)
    assert examine(model).ok
    assert (model.cache.stats(), model.spec.config, model.spec.draft_ms, model.engine.blocks_in_use) == before
    assert random.getstate() == state and model.queue == []


def test_requests_of_others_are_served_meanwhile_in_their_order(make_fake: Any) -> None:
    model = make_fake(delay_s=0.001)
    tickets: list[Any] = []
    ended: list[int] = []

    def submit(report: Report) -> None:
        tickets.append(model.submit("hi", max_new=4, seed=len(report.checks)))
        ended.append(sum(ticket.state == "done" for ticket in tickets))

    examine(model, on_check=submit)
    assert [ticket.result().config.seed for ticket in tickets] == [1, 2, 3, 4, 5, 6]
    # each check came behind the request of the check before
    assert ended[2:4] == [2, 3]


def test_the_report_is_told_as_it_grows(make_fake: Any) -> None:
    seen: list[Report] = []
    report = examine(make_fake(), on_check=seen.append)
    assert [len(part.checks) for part in seen] == [1, 2, 3, 4, 5, 6]
    assert [part.ok for part in seen] == [False] * 5 + [True] and seen[-1] == report
    assert "2 of 6 checks so far, 2 ok" in seen[1].title


@pytest.mark.parametrize(
    ("step", "after"), [("forward_rows", 30), ("forward_rows", 300), ("prefill", 5), ("prefill", 40)]
)
def test_an_interrupt_stops_at_once_and_the_model_works_on(make_fake: Any, step: str, after: int) -> None:
    seen = 0

    def on_step(name: str, state: Any) -> None:
        nonlocal seen
        seen += name == step
        if name == step and seen == after:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.05 if after <= seen < 10**6 else 0)

    model = make_fake(on_step=on_step, drafts=drafts)
    checks: list[Report] = []
    with pytest.raises(KeyboardInterrupt):
        examine(model, on_check=checks.append)
    steps = seen - after
    seen = 10**6
    assert len(checks) < 6 and steps < 10
    assert len(model.generate("hi", max_new=3, seed=0).ids) == 3
    assert model.queue == [] and model.engine.blocks_in_use == 0


# how it looks


def report_of(*checks: Check) -> Report:
    return Report(model="<m>", checks=checks, planned=len(checks), seconds=1.25)


GOOD = Check(name="rows", compared="a against b: 3 rows", result="ok", detail="", seconds=0.5)
BAD = Check(name="text", compared="c < d", result="failed", detail="row <3> differs", seconds=0.75)


def test_the_report_as_text() -> None:
    assert str(report_of(GOOD, BAD)).splitlines() == [
        "<m>: 2 checks, 1 ok, 1 failed, 1.2 s",
        "rows  ok         0.5 s  a against b: 3 rows",
        "text  failed     0.8 s  c < d",
        "                        row <3> differs",
    ]
    long = replace(GOOD, compared="word " * 60)
    assert max(map(len, str(report_of(long)).splitlines())) <= 120
    assert repr(report_of(GOOD)) == str(report_of(GOOD))


def test_the_report_as_html_needs_nothing_and_is_escaped() -> None:
    html = report_of(GOOD, BAD)._repr_html_()
    assert "&lt;m&gt;" in html and "c &lt; d<br>row &lt;3&gt; differs" in html and "<b>failed</b>" in html
    assert "<script" not in html and "<m>" not in html and html.count("<tr>") == 3


def test_the_report_tells_what_it_ran_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VSCODE_PID", "1")
    report = replace(report_of(GOOD), machine=facts())
    told = dict(report.machine)
    assert told["dsv4nb"] == dsv4nb.__version__ and f"torch {torch.__version__}" in told["arithmetic"]
    assert told["host"].startswith("VS Code")
    assert str(report).splitlines()[2:4] == ["", f"dsv4nb      {dsv4nb.__version__}"]
    assert "<th" in report._repr_html_() and "VS Code" in report._repr_html_()
    with fakes.fake_model("one") as model:
        assert examine(model, seconds=1e-9).machine == facts()


@pytest.mark.parametrize(
    ("kernel", "widgets", "told"),
    [
        ("7.4.0", "0.11.0", "is pinned"),
        ("7.3.0", "0.11.0", "click again"),
        ("6.31.0", "0.11.0", "when no cell runs"),
        ("", "", "none, ipykernel and anywidget are missing"),
    ],
)
def test_what_to_expect_of_panels(kernel: str, widgets: str, told: str) -> None:
    assert told in panels(kernel, widgets)


@pytest.mark.parametrize(
    ("checks", "ok"),
    [((GOOD,), True), ((GOOD, BAD), False), ((BAD,), False), ((replace(GOOD, result="skipped"),), False), ((), False)],
)
def test_a_report_is_ok_when_something_was_compared_and_nothing_failed(checks: tuple[Check, ...], ok: bool) -> None:
    assert report_of(*checks).ok is ok
    assert replace(report_of(*checks), planned=7).ok is False


def test_numbers_have_their_nouns() -> None:
    assert [counted(1, "reply"), counted(2, "reply"), counted(1200, "row")] == ["1 reply", "2 replies", "1,200 rows"]
    assert doctor.SECONDS < 60
