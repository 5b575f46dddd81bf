"""Which operation of a forward launches a kernel, what for, and the bytes that it must read.

A profiler tells kernels by their names alone, and a replayed graph tells nothing else. One forward that is launched
kernel by kernel tells the rest: the operations come in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dsv4nb.engine import rank_layer
from dsv4nb.engine.chunk_layer import INDEXED
from dsv4nb.engine.rank_layer import Step
from dsv4nb.weights.store import tensors_of
from dsv4nb_kernels import hyper_mix

# kernels of the operations of a step; those of `OTHERS` read only what the kernel before them has just written
KERNELS: Mapping[str, str] = {
    "_bf16_rows_kernel": "bf16_rows",
    "_fp8_rows_kernel": "fp8_rows",
    "_expand_kernel": "hyper_mix",
    "_collapse_kernel": "hyper_mix",
    "_norm_rope_rows_kernel": "norm_rope_rows",
    "_norm_rope_heads_kernel": "norm_rope_heads",
    "_source_kernel": "compress",
    "_pool_kernel": "compress",
    "_sources_kernel": "compress",
    "_pools_kernel": "compress",
    "_attend_kernel": "sparse_attention",
    "_combine_kernel": "sparse_attention",
    "_round_rows_kernel": "round_rows",
    "_index_rows_kernel": "index_rows",
    "_index_scores_kernel": "index_scores",
    "_top_entries_kernel": "top_entries",
    "_route_kernel": "route",
    "_expert_up_kernel": "expert_up",
    "_round_kernel": "expert_down",
    "_expert_down_kernel": "expert_down",
}
OTHERS = (
    "_collapse_kernel",
    "_source_kernel",
    "_pool_kernel",
    "_sources_kernel",
    "_pools_kernel",
    "_combine_kernel",
    "_round_kernel",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operation of one GPU.

    Attributes:
        device: as torch numbers GPUs; 0 for a CPU.
        use: of several in a layer, which.
        nbytes: that it must read: weights, and rows of caches once each; None where it reads what others just wrote.
    """

    device: int
    operation: str
    use: str
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class _Read:
    """What an operation reads.

    Attributes:
        weights: whole tensors, nested as they may be.
        rows: lists of rows with the bytes of one; every row counts once, and those below 0 do not.
        counts: rows that are seen, from the first on, with the bytes of one; the most counts.
    """

    use: str = ""
    weights: tuple[object, ...] = ()
    rows: tuple[tuple[Tensor, int], ...] = ()
    counts: tuple[tuple[Tensor, int], ...] = ()

    def kept(self) -> _Read:
        """Return it with lists that nobody writes again."""
        rows, counts = (tuple((t.clone(), size) for t, size in held) for held in (self.rows, self.counts))
        return _Read(self.use, self.weights, rows, counts)

    def nbytes(self) -> int | None:
        """Add it up, once everything was computed."""
        if not (self.weights or self.rows or self.counts):
            return None
        whole = sum(tensor.nbytes for tensor in tensors_of(self.weights))
        listed = sum(len(rows[rows >= 0].unique()) * size for rows, size in self.rows)
        return whole + listed + sum(int(seen.max()) * size for seen, size in self.counts)


_Given = tuple[Any, ...]
_Options = dict[str, Any]
_Found = tuple[torch.device, _Read]


class _Noted:
    """The operations so far, and where in the network they are."""

    def __init__(self, *, is_timed: bool) -> None:
        self.reads: list[tuple[int, str, _Read]] = []
        self.events: list[torch.cuda.Event] = []
        self._is_timed = is_timed
        self._name = ""  # of the product that comes next
        self._ratio = 0  # of the layer

    def wrap(self, operation: str, launch: Callable[..., Any], read: _Reader) -> Callable[..., Any]:
        """Return `launch` that is noted first."""

        def noting(*given: Any, **options: Any) -> Any:
            device, reads = read(self, given, options)
            self.reads.append((device.index or 0, operation, reads if self._is_timed else reads.kept()))
            if self._is_timed:
                self.mark(device)
            return launch(*given, **options)

        return noting

    def mark(self, device: torch.device) -> None:
        """Record when the device comes here."""
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record(torch.cuda.current_stream(device))

    def enter(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run_attention` that says which layer it is in."""

        def entering(step: Step, y: Any, weights: Any, *given: Any, **options: Any) -> Any:
            self._ratio = weights.ratio
            return run(step, y, weights, *given, **options)

        return entering

    def name(self, multiply: Callable[..., Any]) -> Callable[..., Any]:
        """Return a product of a step that says its name."""

        def naming(step: Step, name: str, *given: Any, **options: Any) -> Any:
            self._name = name
            return multiply(step, name, *given, **options)

        return naming

    def matrix(self, given: _Given, options: _Options) -> _Found:
        matrix = given[1]
        return matrix.words.device, _Read(self._pooling() if self._name == "source" else self._name, (matrix,))

    def pooled(self, given: _Given, options: _Options) -> _Found:
        return given[0].device, _Read(self._pooling())

    def boundary(self, given: _Given, options: _Options) -> _Found:
        weights = given[3]
        use = "ahead of attention" if options.get("spread") is None else "ahead of experts"
        if weights.fn.shape[0] != hyper_mix.COEFFICIENTS:
            use = "ahead of the head"
        return given[1].device, _Read(use, (weights,))

    def attention(self, given: _Given, options: _Options) -> _Found:
        rows = tuple((keys.places, keys.cache[0].nbytes) for keys in given[1:3] if keys is not None)
        return given[0].device, _Read(f"ratio {self._ratio}" if self._ratio else "window alone", rows=rows)

    def scores(self, given: _Given, options: _Options) -> _Found:
        keys, visible = given[1], given[3]
        return keys.device, _Read(counts=((visible, keys[0].nbytes),))

    def up(self, given: _Given, options: _Options) -> _Found:
        return _experts(given[1], given[3])

    def down(self, given: _Given, options: _Options) -> _Found:
        return _experts(given[1], given[2])

    def other(self, given: _Given, options: _Options) -> _Found:
        return given[0].device, _Read()

    def _pooling(self) -> str:
        return f"ratio {self._ratio}, entries{' and index' if self._ratio == INDEXED else ''}"


_Reader = Callable[[_Noted, _Given, _Options], _Found]

# where the operations of a step are called, and what tells of each what it reads
_NOTED: Sequence[tuple[str, str, _Reader]] = (
    ("bf16_rows.bf16_rows", "bf16_rows", _Noted.matrix),
    ("fp8_rows.fp8_rows", "fp8_rows", _Noted.matrix),
    ("hyper_mix.hyper_mix", "hyper_mix", _Noted.boundary),
    ("norm_rope_write.norm_rope_rows", "norm_rope_rows", _Noted.other),
    ("norm_rope_write.norm_rope_heads", "norm_rope_heads", _Noted.other),
    ("compress.compress", "compress", _Noted.pooled),
    ("_compress_both.compress_both", "compress", _Noted.pooled),
    ("sparse_attention.sparse_attention", "sparse_attention", _Noted.attention),
    ("round_rows", "round_rows", _Noted.other),
    ("index_rows.index_rows", "index_rows", _Noted.other),
    ("index_scores.index_scores", "index_scores", _Noted.scores),
    ("top_entries.top_entries", "top_entries", _Noted.other),
    ("route.route", "route", _Noted.other),
    ("expert_up.expert_up", "expert_up", _Noted.up),
    ("expert_down.expert_down", "expert_down", _Noted.down),
)


def _experts(experts: Tensor, weights: Any) -> _Found:
    return experts.device, _Read("", (weights.shared,), ((experts, weights.routed[0].nbytes),))


def calls(forward: Callable[[], object]) -> tuple[Call, ...]:
    """Run a forward that launches kernel by kernel, and return its operations in the order of each GPU.

    Args:
        forward: warm, so that it launches nothing besides.
    """
    with _noting(is_timed=False) as noted:
        forward()
    return tuple(
        Call(device=device, operation=operation, use=read.use, nbytes=read.nbytes())
        for device, operation, read in noted.reads
    )


def timed(devices: Sequence[torch.device], forward: Callable[[], object], cycles: int) -> tuple[float, ...]:
    """Return what each of `calls` takes in such a forward by the clocks of the GPUs, in us, to the next one's begin.

    The GPUs are kept busy for `cycles` while the host launches. No two kernels overlap: there is an event between them.
    """
    with _noting(is_timed=True) as noted:
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda._sleep(cycles)
        forward()
        ends = {device.index or 0: torch.cuda.Event(enable_timing=True) for device in devices}
        for device in devices:
            with torch.cuda.device(device):
                ends[device.index or 0].record()
                torch.cuda.synchronize()
    taken = [0.0] * len(noted.events)
    for i in reversed(range(len(noted.events))):
        number = noted.reads[i][0]
        taken[i] = 1e3 * noted.events[i].elapsed_time(ends[number])
        ends[number] = noted.events[i]
    return tuple(taken)


@contextmanager
def _noting(*, is_timed: bool) -> Iterator[_Noted]:
    noted = _Noted(is_timed=is_timed)
    with ExitStack() as stack:
        for target, operation, read in _NOTED:
            path, _, name = target.rpartition(".")
            owner = getattr(rank_layer, path) if path else rank_layer
            launch = getattr(owner, name)
            stack.enter_context(patch.object(owner, name, noted.wrap(operation, launch, read)))
        for product in ("fp8", "bf16"):
            stack.enter_context(patch.object(Step, product, noted.name(getattr(Step, product))))
        entering = noted.enter(rank_layer.run_attention)
        stack.enter_context(patch("dsv4nb.engine.rank_forward.run_attention", entering))
        yield noted
