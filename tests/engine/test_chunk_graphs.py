"""What a chunk launches is launched the first time, captured the second time and replayed from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4nb.engine import chunk_graphs
from dsv4nb.engine.chunk_graphs import ChunkGraphs, Key

CPU = torch.device("cpu")


class Caches:
    """Stands for those of a sequence."""


class Graph:
    """Launches again what was launched while it was captured."""

    def __init__(self, log: list[str], launched: list[str]) -> None:
        self._log, self._launched = log, launched

    def replay(self) -> None:
        self._log += self._launched


class Graphs:
    """Captures as `engine.graphs.Graphs` does: what is launched meanwhile does not run."""

    is_on = True

    def __init__(self, log: list[str]) -> None:
        self.log, self.captured = log, 0

    def capture(self, held: dict[object, Any], key: object, launch: Callable[[], None]) -> bool:
        before = len(self.log)
        launch()
        held[key] = Graph(self.log, self.log[before:])
        del self.log[before:]
        self.captured += 1
        return True


def key(rows: int = 64, **changed: Any) -> Key:
    return Key(**{"rows": rows, "keys": 0, "piece": 0, "has_head": True, "room_bytes": 0} | changed)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def made(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], ChunkGraphs]:
    def make(joins: bool) -> ChunkGraphs:
        monkeypatch.setattr(chunk_graphs, "Graphs", lambda device, *, is_on: Graphs(log))
        return ChunkGraphs(CPU, is_on=True, joins=joins)

    return make


def turn(graphs: ChunkGraphs, caches: Any, log: list[str], of: Key) -> tuple[list[str], list[int]]:
    """Run a chunk; return what was launched and joined, in order, and which tensors were yielded."""
    parts = [torch.full((1,), number) for number in range(2)]

    def launches() -> Iterator[Tensor]:
        for number, part in enumerate(parts):
            log.append(f"{of.rows} rows, part {number}")
            yield part
        log.append(f"{of.rows} rows, end")

    log.clear()
    yielded = []
    for part in graphs.run(caches, of, launches):
        yielded.append(int(part))
        log.append(f"join {int(part)}")
    return list(log), yielded


@pytest.mark.parametrize("joins", [True, False])
def test_each_turn_launches_the_same_in_the_same_order(
    made: Callable[[bool], ChunkGraphs], log: list[str], joins: bool
) -> None:
    graphs, caches = made(joins), Caches()
    first, _ = turn(graphs, caches, log, key())
    assert first == ["64 rows, part 0", "join 0", "64 rows, part 1", "join 1", "64 rows, end"]
    wanted = first if joins else [line for line in first if "join" not in line]
    for _ in range(3):
        assert turn(graphs, caches, log, key()) == (wanted, [0, 1] if joins else [])
    assert graphs._graphs.captured == (3 if joins else 1)


def test_another_shape_or_other_caches_are_launched_first(made: Callable[[bool], ChunkGraphs], log: list[str]) -> None:
    graphs, caches = made(True), Caches()
    others = [key(rows=128), key(keys=4096), key(piece=1), key(has_head=False), key(room_bytes=1)]
    for number, of in enumerate((key(), *others)):
        turn(graphs, caches, log, of)
        assert graphs._graphs.captured == 3 * number
        turn(graphs, caches, log, of)
    turn(graphs, Caches(), log, key())
    assert graphs._graphs.captured == 3 * (1 + len(others))
    assert turn(graphs, caches, log, key(rows=128))[0][0] == "128 rows, part 0"


def test_so_many_shapes_are_captured_and_no_more(made: Callable[[bool], ChunkGraphs], log: list[str]) -> None:
    graphs, caches = made(False), Caches()
    for rows in range(chunk_graphs.MOST + 2):
        for _ in range(3):
            assert turn(graphs, caches, log, key(rows))[0][0] == f"{rows} rows, part 0"
    assert graphs._graphs.captured == chunk_graphs.MOST


def test_what_fails_is_neither_replayed_nor_marked(made: Callable[[bool], ChunkGraphs], log: list[str]) -> None:
    graphs, caches = made(True), Caches()

    def failing() -> Iterator[Tensor]:
        log.append("begin")
        yield torch.zeros(1)
        raise ZeroDivisionError

    def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            list(graphs.run(caches, key(), failing))  # type: ignore[arg-type]

    fail()
    fail()
    assert (log, graphs._graphs.captured) == (["begin"] * 2, 0)  # launched both times
    whole, _ = turn(graphs, caches, log, key())
    fail()
    assert graphs._graphs.captured == 1  # of three pieces
    assert turn(graphs, caches, log, key()) == (whole, [0, 1])
    assert graphs._graphs.captured == 1 + 3
    assert turn(graphs, caches, log, key()) == (whole, [0, 1])


def test_what_is_off_and_a_cpu_launch_each_time(log: list[str]) -> None:
    for is_on in (True, False):
        graphs, caches = ChunkGraphs(CPU, is_on=is_on, joins=True), Caches()
        for _ in range(3):
            assert turn(graphs, caches, log, key())[1] == [0, 1]
        assert graphs._graphs.captured == 0
