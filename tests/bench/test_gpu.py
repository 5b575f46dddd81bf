"""What only a GPU has."""

from __future__ import annotations

import time

import pytest
import torch

from dsv4nb.bench import gpu
from dsv4nb.bench.spread import Times

CPU = torch.device("cpu")


def test_reads_what_nvidia_smi_answers() -> None:
    found = gpu.parse_clocks("GPU 0", "1980, 3201, 1980, 612.3, 61\n")
    assert found is not None
    assert str(found) == "GPU 0: SM 1980 of 1980 MHz, memory 3201 MHz, 612 W, 61 C"
    assert gpu.parse_clocks("GPU 0", "[N/A], 3201, 1980, 300.5, 50\n") is None
    assert gpu.parse_clocks("GPU 0", "") is None


def test_a_cpu_has_neither_clock_nor_rate() -> None:
    worked: list[float] = []
    assert gpu.clocks([CPU], worked.append) == ()
    assert gpu.copy_rate(CPU) is None
    assert gpu.device_ms(CPU, lambda: worked.append(0.0)) is None
    assert worked == [] and gpu.names_of([CPU]) == ("cpu",)


@pytest.mark.gpu
def test_the_gpus_clock_leaves_out_what_the_host_takes() -> None:
    device = torch.device("cuda", 0)
    x = torch.zeros(1 << 28, device=device)

    def add() -> None:
        time.sleep(1e-3)  # twice as long as the GPU takes
        x.add_(1)

    took, rates = [], []
    for _ in range(4):  # the best of either, in turn: others may use the GPU now and then
        took += [gpu.device_ms(device, add) for _ in range(10)]
        rates.append(gpu.copy_rate(device))
    rate = max(rate for rate in rates if rate is not None)
    best = min(ms for ms in took if ms is not None)
    assert best == pytest.approx(2 * x.nbytes / rate / 1e9, rel=0.3)


@pytest.mark.gpu
def test_clocks_are_those_of_a_busy_gpu() -> None:
    device = torch.device("cuda", 0)
    x = torch.zeros(1 << 28, device=device)

    def work(seconds: float) -> None:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        while True:
            x.add_(1)
            stop.record()
            stop.synchronize()
            if start.elapsed_time(stop) > 1e3 * seconds:
                return

    (found,) = gpu.clocks([device], work)
    assert 0 < found.sm_mhz <= found.sm_max_mhz and found.memory_mhz > 0 and found.power_w > 0


def test_times_have_a_middle_and_a_tail() -> None:
    times = Times.of([float(n) for n in range(100, 0, -1)])
    assert (times.samples, times.median, times.p95, times.low, times.high) == (100, 50.5, 95.0, 1.0, 100.0)
    assert times.tail == pytest.approx(95 / 50.5)
    assert Times.of([2.0]).p95 == 2.0
