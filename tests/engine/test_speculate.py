"""A round: who is asked for its choices, the engine or the judge."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dsv4nb.config import SamplerConfig, SpecConfig
from dsv4nb.engine.plain_choice import GREEDY, PlainChoice
from dsv4nb.engine.protocol import ChooseDraft, Proposal, Row, Verified
from dsv4nb.engine.speculate import Choice, Played, measure, play, run_rows
from dsv4nb.events import TokenLogprob
from dsv4nb.testing.fake_engine import FakeEngine

TOLD = TokenLogprob(id=2, logprob=-1.0, rank=1, entropy=0.0, top=())
ROWS = np.eye(4, 6, dtype=np.float32)  # row i says token i


class Line:
    """A sequence at position 7 whose drafts are 0, 1, 2."""

    pos, room = 7, 50

    def __init__(self, ids: tuple[int, ...] = (), *, runs_ahead: bool = False) -> None:
        self.runs_ahead, self.together = runs_ahead, list[tuple[int, SamplerConfig, SamplerConfig]]()
        self.ids, self.chooses, self.configs = ids, list[ChooseDraft](), list[SamplerConfig | None]()

    def draft(self, pending: int, choose: ChooseDraft) -> Proposal:
        self.chooses.append(choose)
        return Proposal(ids=(0, 1, 2))

    def draft_and_verify(
        self, pending: int, rows: int, drafts_by: SamplerConfig, config: SamplerConfig
    ) -> tuple[Proposal, Verified] | None:
        self.together.append((rows, drafts_by, config))
        if not self.runs_ahead:
            return None
        rows = min(rows, 4)
        return Proposal(ids=(0, 1, 2), ms=2.0), Verified(rows=tuple(ROWS[:rows]), ids=self.ids[:rows])

    def verify(self, tokens: Sequence[int], config: SamplerConfig | None) -> Verified:
        self.configs.append(config)
        return Verified(rows=tuple(ROWS[: len(tokens)]), ids=self.ids)


class Judge:
    """Takes the best, and notes what it was asked."""

    def __init__(self, drafts_by: SamplerConfig | None = None, decides_by: SamplerConfig | None = None) -> None:
        self.drafts_by, self.decides_by = drafts_by, decides_by
        self.drafted, self.decided = list[int](), list[tuple[int, int | None]]()
        self.heard: list[tuple[int, int]] = []

    def draft(self, row: Row, position: int, ahead: Sequence[int]) -> int:
        self.drafted.append(position)
        return int(row.argmax())

    def legal(self, drafts: Sequence[int]) -> int:
        return len(drafts)

    def decide(self, row: Row, position: int, ahead: Sequence[int], draft: int | None) -> Choice:
        self.decided.append((position, draft))
        return Choice(token=int(row.argmax()))

    def told(self, token: int, rows: Sequence[Row], place: int) -> Choice:
        assert len(rows) > place
        self.heard.append((place, token))
        return Choice(token=token, logprob=TOLD)

    def is_end(self, token: int) -> bool:
        return False


def played(line: Line, judge: Judge, spec: SpecConfig | None = None, tokens_left: int = 20) -> Played:
    return play(line, 5, judge, spec or SpecConfig(), costs=None, tokens_left=tokens_left)


def test_a_judge_that_is_more_than_a_sampler_is_asked_for_everything() -> None:
    line, judge = Line(), Judge()
    assert played(line, judge).tokens == (0, 1, 2, 3)
    assert judge.decided == [(8, 0), (9, 1), (10, 2), (11, None)] and line.configs == [None]
    (choose,) = line.chooses
    assert not isinstance(choose, PlainChoice)
    assert (choose(ROWS[1], 2, (4, 4)), judge.drafted) == (1, [10])


def test_a_judge_that_is_a_sampler_is_not_asked_where_the_engine_chose() -> None:
    config = SamplerConfig(seed=3)
    line, judge = Line(ids=(0, 1, 2, 3)), Judge(GREEDY, config)
    result = played(line, judge)
    assert (result.tokens, judge.decided, line.configs) == ((0, 1, 2, 3), [], [config])
    assert line.chooses == [PlainChoice(config=GREEDY, first=8)]
    assert judge.heard == [(i, i) for i in range(4)] and result.choices[2] == Choice(token=2, logprob=TOLD)
    # an engine that does not choose, and a row that it refuses
    for ids, asked in (((), [8, 9, 10, 11]), ((0, 1, -1, 3), [10])):
        judge = Judge(config, config)
        assert played(Line(ids=ids), judge).tokens == (0, 1, 2, 3)
        assert [position for position, _ in judge.decided] == asked


def test_rows_are_run_with_the_drafts_where_nothing_has_to_be_known_of_them() -> None:
    config = SamplerConfig(seed=3)
    for spec, left, rows, n in (
        (SpecConfig(), 20, 8, 4),
        (SpecConfig(depth=3), 20, 3, 3),
        (SpecConfig(), 2, 2, 2),
    ):
        line, judge = Line(ids=(0, 1, 2, 3), runs_ahead=True), Judge(GREEDY, config)
        result = played(line, judge, spec, left)
        assert (line.together, line.chooses, line.configs) == ([(rows, GREEDY, config)], [], [])
        assert (result.tokens, result.plan.t_batch) == ((0, 1, 2, 3)[:n], n)
        assert result.draft_ms == pytest.approx(2.0) and result.verify_ms >= 0  # it took less than that


@pytest.mark.parametrize(
    ("judge", "spec", "left"),
    [
        (Judge(GREEDY, GREEDY), SpecConfig(window="slot"), 20),
        (Judge(GREEDY, GREEDY), SpecConfig(depth=1), 20),
        (Judge(GREEDY, GREEDY), SpecConfig(), 1),
        (Judge(GREEDY, None), SpecConfig(), 20),
        (Judge(), SpecConfig(), 20),
    ],
)
def test_rows_wait_for_the_drafts_where_they_depend_on_them(judge: Judge, spec: SpecConfig, left: int) -> None:
    line = Line(ids=(0, 1, 2, 3) if judge.decides_by else (), runs_ahead=True)
    n = 4 if spec.depth != 1 and left > 1 else 1
    assert played(line, judge, spec, left).tokens == (0, 1, 2, 3)[:n]
    assert not line.together and len(line.configs) == 1


def test_what_the_engine_chose_ends_a_round_as_the_judge_would() -> None:
    assert played(Line(ids=(0, 4, 2, 3)), Judge(GREEDY, GREEDY)).tokens == (0, 4)


def test_a_plain_choice_is_the_samplers() -> None:
    row = np.array([0.1, 3.0, 2.0], np.float32)
    assert PlainChoice(config=GREEDY, first=4)(row, 0, ()) == 1
    drawn = PlainChoice(config=SamplerConfig(temperature=9.0, seed=1), first=4)
    later = PlainChoice(config=SamplerConfig(temperature=9.0, seed=1), first=5)
    assert [drawn(row, slot + 1, ()) for slot in range(20)] == [later(row, slot, ()) for slot in range(20)]
    assert len({drawn(row, slot, ()) for slot in range(20)}) > 1


def test_only_an_engine_that_can_is_asked_to_choose() -> None:
    engine = FakeEngine(vocab_size=300, max_seq=64)
    state = engine.new_state()
    engine.prefill(state, [1, 2, 3])
    for config in (None, GREEDY):
        found = run_rows(engine, state, [4, 5], config)
        assert (found.ids, found.token(0), len(found.rows)) == ((), None, 2)
        assert np.array_equal(found.rows, engine.forward_rows(state, [4, 5]))

    class Drawing(FakeEngine):
        def draw_rows(self, state: object, tokens: Sequence[int], config: SamplerConfig) -> Verified:
            return Verified(rows=(), ids=(*tokens, config.seed))

    drawing = Drawing(vocab_size=300, max_seq=64)
    state = drawing.new_state()
    drawing.prefill(state, [1, 2, 3])
    assert run_rows(drawing, state, [4, 5], SamplerConfig(seed=9)).ids == (4, 5, 9)
    assert run_rows(drawing, state, [4, 5], None).ids == ()


def test_costs_are_measured_as_rounds_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, widths = FakeEngine(vocab_size=300, max_seq=64), list[int]()
    monkeypatch.setattr(FakeEngine, "block_size", 2)
    chooses: list[ChooseDraft] = []
    monkeypatch.setattr(engine, "draft", lambda state, pending, choose: chooses.append(choose), raising=False)

    def draw_rows(state: object, tokens: Sequence[int], config: SamplerConfig) -> Verified:
        widths.append(len(tokens))
        return Verified(rows=(), ids=(0,) * len(tokens))

    monkeypatch.setattr(engine, "draw_rows", draw_rows, raising=False)
    measure(engine)
    assert widths == [1, 2, 3] * 5
    assert chooses == [PlainChoice(config=GREEDY, first=17 + number) for number in range(5)]
