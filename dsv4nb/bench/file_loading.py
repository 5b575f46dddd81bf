"""Loading real files: what it takes, next to reading the same files and doing nothing with them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4nb.bench import devices as named
from dsv4nb.bench.gpu import names_of
from dsv4nb.bench.spread import Spread
from dsv4nb.checkpoint.headers import TensorEntry
from dsv4nb.checkpoint.opening import Checkpoint, open_checkpoint
from dsv4nb.engine.gpus import TENSOR, placed
from dsv4nb.weights.pieces import Piece
from dsv4nb.weights.placement import SharedKind
from dsv4nb.weights.progress import LoadStep
from dsv4nb.weights.rank_loader import load_ranks
from dsv4nb.weights.read_ahead import SLOT_BYTES, SLOTS, THREADS, ReadAhead

_STATUS = Path("/proc/self/status")
_SAMPLE_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was measured; rates in GB/s.

    Attributes:
        shards, file_bytes: of the folder; tensors, loaded_bytes: what a load takes of them.
        fits_memory: whether the system can keep all files in its page cache.
        first_read: by the threads of a load, into its ring, and dropped, before anything else: what a disk gives, or a
            page cache that has the files already.
        read: the same afterwards, before each load.
        load: onto the devices, packed.
        share: of `read` that `load` is, medians.
        anon_before, anon_peak, high_water: bytes of memory of this process that no file backs, before and at most
            during the loads, and of all its memory at most; None where the system does not tell.
        peak_device_bytes: allocated at most on each GPU, () without one; `resident_bytes`: of the weights on each
            device.
    """

    folder: str
    devices: tuple[str, ...]
    shared: SharedKind | None
    shards: int
    file_bytes: int
    tensors: int
    loaded_bytes: int
    fits_memory: bool
    threads: int
    ring_bytes: int
    runs: int
    first_read: float
    read: Spread
    load: Spread
    share: float
    load_s: Spread
    anon_before: int | None
    anon_peak: int | None
    high_water: int | None
    resident_bytes: tuple[int, ...]
    peak_device_bytes: tuple[int, ...]

    def __str__(self) -> str:
        cache = "warm: read once before" if self.fits_memory else "smaller than the files: they come from the disk"
        held = ", ".join(map(_gb, self.resident_bytes))
        lines = [
            ("files", f"{self.shards} shards, {self.file_bytes:,} bytes, {self.folder}"),
            ("devices", ", ".join(self.devices) + (f", {self.shared}" if self.shared else "")),
            ("page cache", f"{cache}, at {self.first_read:.2f} GB/s"),
            ("ring", f"{self.threads} threads, {self.ring_bytes / 2**20:.0f} MiB at most"),
            ("read", f"{self.read} GB/s, dropped; {self.runs} runs, one before each load"),
            ("load", f"{self.load} GB/s, {self.tensors:,} tensors, {self.loaded_bytes:,} bytes in {self.load_s} s"),
            ("share", f"{100 * self.share:.0f} % of read"),
            ("host peak", f"{_gb(self.anon_peak)} that no file backs, {_gb(self.anon_before)} of it before"),
            ("high water", f"{_gb(self.high_water)}, all that was in memory"),
            ("weights", held),
            ("GPU peak", ", ".join(map(_gb, self.peak_device_bytes)) or "no GPU"),
        ]
        return "\n".join(f"{label:<12}{text}" for label, text in lines)


def file_loading(folder: Path, devices: str, placement: SharedKind | None = None, *, runs: int = 3) -> Report:
    """Read and load the checkpoint in `folder` in turns, the drafter too where there is one.

    Args:
        devices: GPU ids, such as "0" or "0,1".
        placement: how several share the model; as `dsv4nb.load` chooses when None.

    Raises:
        RequestError, CheckpointError, NotEnoughMemory: as `dsv4nb.load`.
    """
    on = named.devices_of(devices, placement)
    kind = placed([device.index or 0 for device in on], placement)[0] if len(on) > 1 else None
    checkpoint = open_checkpoint(folder, require_tokenizer=False)
    gpus = [device for device in on if device.type == "cuda"]
    for device in gpus:
        torch.zeros(1, device=device)  # what a process needs of a GPU once is no part of a load
        torch.cuda.reset_peak_memory_stats(device)
    first_read = _read(checkpoint, on)
    reads: list[float] = []
    loads: list[_Load] = []
    before = _status("RssAnon")
    with _anonymous_peak() as peak:
        for _ in range(runs):
            reads.append(_read(checkpoint, on))
            loads.append(_load(checkpoint, on, kind or TENSOR))
    read, load = Spread.of(reads), Spread.of([one.loaded_bytes / one.seconds / 1e9 for one in loads])
    return Report(
        folder=str(folder),
        devices=names_of(on),
        shared=kind,
        shards=len({entry.file for entry in checkpoint.entries.values()}),
        file_bytes=checkpoint.file_bytes,
        tensors=sum(checkpoint.drafter == "dspark" or not name.startswith("mtp.") for name in checkpoint.entries),
        loaded_bytes=loads[-1].loaded_bytes,
        fits_memory=checkpoint.file_bytes < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        threads=THREADS,
        ring_bytes=SLOTS * SLOT_BYTES,
        runs=runs,
        first_read=first_read,
        read=read,
        load=load,
        share=load.median / read.median,
        load_s=Spread.of([one.seconds for one in loads]),
        anon_before=before,
        anon_peak=max(peak, default=None),
        high_water=_status("VmHWM"),
        resident_bytes=loads[-1].resident_bytes,
        peak_device_bytes=tuple(torch.cuda.max_memory_allocated(device) for device in gpus),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    seconds: float
    loaded_bytes: int
    resident_bytes: tuple[int, ...]


def _load(checkpoint: Checkpoint, devices: Sequence[torch.device], kind: SharedKind) -> _Load:
    """Load the weights and let them go."""
    done = 0

    def note(step: LoadStep) -> None:
        nonlocal done
        done = step.done_bytes

    started = time.perf_counter()
    ranks = load_ranks(checkpoint, devices, kind=kind, drafter=True, on_progress=note)
    _wait(devices)
    seconds = time.perf_counter() - started
    return _Load(seconds=seconds, loaded_bytes=done, resident_bytes=tuple(rank.resident_bytes for rank in ranks))


def _read(checkpoint: Checkpoint, devices: Sequence[torch.device]) -> float:
    """Read all files from end to end and drop them; return GB/s."""
    files, pieces = {}, []
    for path in sorted({entry.file for entry in checkpoint.entries.values()}):
        size = path.stat().st_size
        files[path.name] = TensorEntry(name=path.name, dtype="U8", shape=(size,), file=path, offset=0, nbytes=size)
        for first in range(0, size, SLOT_BYTES):
            last = min(first + SLOT_BYTES, size)
            pieces.append(Piece(names=(path.name,), row=0, first=first, last=last, holders=()))
    started = time.perf_counter()
    with ReadAhead(files, pieces, gpu=next((device for device in devices if device.type == "cuda"), None)) as ahead:
        for number in range(len(pieces)):
            ahead.give_back(ahead.take(number))
    return sum(piece.nbytes for piece in pieces) / (time.perf_counter() - started) / 1e9


def _wait(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@contextmanager
def _anonymous_peak() -> Iterator[set[int]]:
    """Yield a set that gets the most bytes that no file backed while it was open, where the system tells them."""
    peak: set[int] = set()
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(_SAMPLE_S):
            most = max(most, _status("RssAnon") or 0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()
        if most:
            peak.add(most)


def _status(field: str) -> int | None:
    """Return bytes of this process, by the system's name for them; None where it does not tell."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)


def _gb(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 1e9:.2f} GB"
