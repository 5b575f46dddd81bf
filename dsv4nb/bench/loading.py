"""Loading on random weights: what making and packing them takes, in time and memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4nb.bench import devices as named
from dsv4nb.bench.asked import Asked, Ran, ran
from dsv4nb.bench.decode import peak_rss_mb
from dsv4nb.bench.gpu import names_of
from dsv4nb.bench.rig import made_weights, shared
from dsv4nb.weights.progress import LoadStep
from dsv4nb.weights.synthetic import SyntheticReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was measured.

    Attributes:
        tensors, stored_bytes: that were made, as a checkpoint stores them.
        peak_rss_mb: of this process, torch included; None where the system does not tell.
        peak_device_bytes: allocated at most on each GPU, () without one.
    """

    ran: Ran
    tensors: int
    stored_bytes: int
    gb_s: float
    peak_rss_mb: float | None
    peak_device_bytes: tuple[int, ...]

    def __str__(self) -> str:
        skipped = ("prefix", "routes", "graphs", "copy rate")
        lines = [f"{label:<12}{text}" for label, text in self.ran.rows() if label not in skipped]
        rss = "unknown" if self.peak_rss_mb is None else f"{self.peak_rss_mb:.0f} MB"
        peaks = ", ".join(f"{n / 1e9:.2f} GB" for n in self.peak_device_bytes) or "no GPU"
        lines.append(f"{'made':<12}{self.tensors:,} tensors, {self.stored_bytes:,} bytes, {self.gb_s:.2f} GB/s")
        lines.append(f"{'host peak':<12}{rss}")
        lines.append(f"{'GPU peak':<12}{peaks}")
        return "\n".join(lines)


def loading(asked: Asked) -> Report:
    """Make the weights once.

    Raises:
        RequestError, CheckpointError, NotEnoughMemory: as `dsv4nb.bench.rig.rig`.
    """
    devices = named.devices_of(asked.devices, asked.placement)
    config = asked.config()
    on_gpus = [device for device in devices if device.type == "cuda"]
    for device in on_gpus:
        torch.cuda.reset_peak_memory_stats(device)
    steps: list[LoadStep] = []
    ranks, load_s = made_weights(asked, config, devices, on_progress=steps.append)
    return Report(
        ran=ran(
            asked,
            config,
            devices=names_of(devices),
            shared=shared(asked, ranks),
            max_seq=0,
            load_s=load_s,
            copy_tb_s=None,
            resident_bytes=tuple(weights.resident_bytes for weights in ranks),
        ),
        tensors=sum(asked.drafter or not name.startswith("mtp.") for name in SyntheticReader(config).entries),
        stored_bytes=steps[-1].done_bytes,
        gb_s=steps[-1].done_bytes / load_s / 1e9,
        peak_rss_mb=peak_rss_mb(),
        peak_device_bytes=tuple(torch.cuda.max_memory_allocated(device) for device in on_gpus),
    )
