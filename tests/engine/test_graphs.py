"""Launches that are captured: every time on a CPU, once and replayed on a GPU."""

from __future__ import annotations

import pytest
import torch

from dsv4nb.engine.graphs import Graphs, Held


def test_without_graphs_everything_is_launched_each_time() -> None:
    graphs, held, launched = Graphs(torch.device("cpu"), is_on=True), Held(), list[int]()
    for number in range(3):
        graphs.run(held, "key", lambda number=number: launched.append(number))
    assert launched == [0, 1, 2] and held == {} and not graphs.is_on
    assert not graphs.capture(held, "key", lambda: launched.append(3))
    assert launched == [0, 1, 2]


@pytest.mark.gpu
def test_a_launch_is_captured_once_and_replayed() -> None:
    device = torch.device("cuda")
    graphs, held, launched = Graphs(device, is_on=True), Held(), 0
    total = torch.zeros(1, device=device)

    def launch() -> None:
        nonlocal launched
        launched += 1
        total.add_(1)

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # behind the zero
    with torch.cuda.stream(stream):
        for _ in range(4):
            graphs.run(held, "key", launch)
    stream.synchronize()
    assert (int(total), launched, list(held)) == (4, 2, ["key"])


@pytest.mark.gpu
def test_a_pool_outlives_the_graphs_of_every_state() -> None:
    device = torch.device("cuda")
    graphs, total = Graphs(device, is_on=True), torch.zeros(1, device=device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            held = Held()
            for _ in range(2):
                graphs.run(held, "key", lambda: total.add_(1))
            del held
    stream.synchronize()
    assert int(total) == 6
