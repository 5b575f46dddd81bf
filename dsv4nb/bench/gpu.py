"""What only a GPU has: a clock of its own, a copy rate, frequencies."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

HEAD_START_CYCLES = 4_000_000  # about 2 ms, in which the host launches what is timed
BUSY_S = 2.0  # longer than a question to nvidia-smi takes

_ASKED = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """One GPU while it computed.

    Attributes:
        sm_mhz, memory_mhz, sm_max_mhz: frequencies.
    """

    device: str
    sm_mhz: float
    memory_mhz: float
    sm_max_mhz: float
    power_w: float
    temperature_c: float

    def __str__(self) -> str:
        return (
            f"{self.device}: SM {self.sm_mhz:.0f} of {self.sm_max_mhz:.0f} MHz, memory {self.memory_mhz:.0f} MHz,"
            f" {self.power_w:.0f} W, {self.temperature_c:.0f} C"
        )


def names_of(devices: Sequence[torch.device]) -> tuple[str, ...]:
    """Return each device as people call it."""
    return tuple(
        f"GPU {device.index} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
        for device in devices
    )


def copy_rate(device: torch.device) -> float | None:
    """Return the copy rate in TB/s, bytes read plus bytes written, None where there is no GPU; before weights load."""
    if device.type != "cuda":
        return None
    from dsv4nb_kernels.bench import _driver

    with torch.cuda.device(device):
        rate = _driver.copy_rate(device)
    _driver.random_words.cache_clear()
    torch.cuda.empty_cache()
    return rate


def device_ms(device: torch.device, call: Callable[[], object], *, cycles: int = HEAD_START_CYCLES) -> float | None:
    """Return what `call` takes on the GPU's own clock, None where there is none.

    The GPU is kept busy while the host launches; so what is counted is the GPU's time alone, up to where the host
    knows that it has ended.

    Args:
        call: launches on the current stream of `device`, and waits for it or not.
    """
    if device.type != "cuda":
        return None
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(cycles)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def clocks(devices: Sequence[torch.device], work: Callable[[float], None]) -> tuple[Clocks, ...]:
    """Return the frequencies of the GPUs while they do `work`, none where nothing tells.

    Args:
        work: computes for so many seconds.
    """
    if any(device.type != "cuda" for device in devices) or shutil.which("nvidia-smi") is None:
        return ()
    work(BUSY_S / 4)  # until frequencies have settled
    ids = [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices]
    asking = [
        subprocess.Popen(
            ["nvidia-smi", "-i", one, f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for one in ids
    ]
    work(BUSY_S)
    told = [process.communicate(timeout=30)[0] for process in asking]
    found = [parse_clocks(name, text) for name, text in zip(names_of(devices), told, strict=True)]
    return tuple(one for one in found if one is not None)


def parse_clocks(device: str, text: str) -> Clocks | None:
    """Read nvidia-smi's answer; None when it has no numbers."""
    try:
        sm, memory, most, power, temperature = map(float, text.split(","))
    except ValueError:
        return None
    return Clocks(
        device=device, sm_mhz=sm, memory_mhz=memory, sm_max_mhz=most, power_w=power, temperature_c=temperature
    )
