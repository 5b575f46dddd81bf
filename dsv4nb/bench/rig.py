"""A GPU engine on random weights that can stand at any position; for measuring alone.

Its prefix is random numbers in the caches, so that a context of a million costs no prompt. With measured routes every
layer looks its experts up in a table by token, as hash-routed layers do, and the token of a position is its number:
so the table names the experts of every position, and nothing of the engine is another one.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from dsv4nb.bench import devices as named
from dsv4nb.bench.asked import SPAN, Asked, Ran, ran
from dsv4nb.bench.gpu import copy_rate, device_ms, names_of
from dsv4nb.bench.traffic import Traffic
from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.checkpoint.revision import detect_contract
from dsv4nb.engine.device import DeviceEngine
from dsv4nb.engine.device_state import DeviceState
from dsv4nb.engine.gpus import PIPELINE, TENSOR, placed
from dsv4nb.engine.plain_choice import GREEDY, PlainChoice
from dsv4nb.engine.protocol import MAX_ROWS
from dsv4nb.weights.placement import SharedKind, place
from dsv4nb.weights.progress import Progress
from dsv4nb.weights.rank_loader import load_ranks
from dsv4nb.weights.rank_store import RankWeights
from dsv4nb.weights.replayed_routes import Table, replayed_tables
from dsv4nb.weights.synthetic import SyntheticReader
from dsv4nb_kernels import route
from dsv4nb_kernels.bench._records import random_records

ROUTED_POSITIONS = 2048  # of a table, after which it begins anew
COUNTED = 16  # forwards whose experts are counted, for each width at each context
EAGER_CYCLES = 100_000_000  # about 50 ms: as long as the host may take to launch a step kernel by kernel


class Rig:
    """An engine, and one sequence that stands where it is put.

    Attributes:
        devices: of the engine, the measured one first.
        traffic: what the rank with the most work reads; of ranks that run one after the other, all of them.
        facts: for reports.
        experts: different ones that a forward visits on a layer, on average, by (context, width).
    """

    def __init__(
        self,
        asked: Asked,
        ranks: Sequence[RankWeights],
        config: ModelConfig,
        traffic: Traffic,
        facts: Ran,
        *,
        counts: bool,
    ) -> None:
        self.asked, self.traffic, self.facts = asked, traffic, facts
        self.devices = tuple(weights.device for weights in ranks)
        self._ranks, self._config = ranks, config
        self._tokens = random.Random(asked.seed)
        self.experts = self._counted() if counts else {}  # before the caches of the engine that is measured
        self.engine = self._engine(graphs=asked.graphs)
        self.state = self._random_state(self.engine)

    def close(self) -> None:
        """Free everything; idempotent."""
        self.engine.close()
        self._ranks = ()

    def tokens(self, pos: int, count: int) -> list[int]:
        """Return ids for positions pos …: their numbers where a table is replayed, else random ones."""
        vocab = self._config.vocab_size
        if self.asked.routes == "measured":
            return [(pos + i) % min(ROUTED_POSITIONS, vocab) for i in range(count)]
        return [self._tokens.randrange(vocab) for _ in range(count)]

    def forward(self, pos: int, width: int) -> None:
        """Run a forward of `width` rows at `pos` and wait for the best token behind each."""
        self.stand(pos)
        self.engine.draw_rows(self.state, self.tokens(pos, width), GREEDY)

    def stand(self, pos: int) -> None:
        """Put the sequence at `pos`."""
        self.state.pos, self.state.pending = pos, 0
        self.state.context = max(pos - 1, 0)  # behind a round one committed row at least is new to the drafter

    def draft(self, pos: int) -> None:
        """Draft a block behind a token at `pos`, each time the best."""
        self.stand(pos)
        self.engine.draft(self.state, self.tokens(pos, 1)[0], PlainChoice(config=GREEDY, first=pos + 1))

    def wall_ms(self, pos: int, width: int) -> float:
        """Time `forward` from the call to the tokens on the host."""
        tokens = self.tokens(pos, width)
        self.stand(pos)
        started = time.perf_counter()
        self.engine.draw_rows(self.state, tokens, GREEDY)
        return 1e3 * (time.perf_counter() - started)

    def device_ms(self, pos: int, width: int) -> float | None:
        """Time it on the GPU's own clock; None without one."""
        tokens = self.tokens(pos, width)
        self.stand(pos)
        cycles = {} if self.asked.graphs else {"cycles": EAGER_CYCLES}
        with self.engine._running():  # the engine's own stream, which nothing above the engine is told
            return device_ms(self.devices[0], lambda: self.engine.draw_rows(self.state, tokens, GREEDY), **cycles)

    def work(self, seconds: float) -> None:
        """Run forwards for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.forward(self.asked.contexts[0], self.asked.widths[0])

    def _counted(self) -> dict[tuple[int, int], float]:
        """Count the experts while kernels are launched one by one, with the prefix that is measured."""
        engine = self._engine(graphs=False)
        state = self._random_state(engine)
        counted = {}
        for context in self.asked.contexts:
            for width in self.asked.widths:
                seen = []
                for pos in counted_positions(context, width):
                    state.pos, state.pending = pos, 0
                    with _noted_routes() as chosen:
                        engine.forward_rows(state, self.tokens(pos, width))
                    seen += [len(experts.unique()) for experts in chosen]
                counted[context, width] = statistics.fmean(seen)
        engine.release(state)
        engine.close()
        return counted

    def _engine(self, *, graphs: bool) -> DeviceEngine:
        contract, _ = detect_contract(self._config, ())
        return DeviceEngine(
            self._ranks,
            self._config,
            contract,
            max_seq=self.facts.max_seq,
            graphs=graphs,
            prefill=self.asked.form,
            chunk_rows=self.asked.chunk_rows,
        )

    def _random_state(self, engine: DeviceEngine) -> DeviceState:
        """Make a state whose caches hold random numbers everywhere: the same ones each time."""
        state = engine.new_state()
        with engine._running():
            state.grow(engine.max_seq)
            for caches in state.caches.copies:
                generators = {device: torch.Generator(device).manual_seed(self.asked.seed) for device in caches.devices}
                for owner in (*caches.layers, *(() if caches.draft is None else (caches.draft,))):
                    for buffer in owner.buffers():
                        self._fill(buffer, generators[buffer.device])
        return state

    def _fill(self, buffer: Tensor, generator: torch.Generator) -> None:
        if buffer.dtype != torch.uint8:
            buffer.normal_(generator=generator)
            return
        width, tail = self._config.head_dim, self._config.qk_rope_head_dim
        buffer.copy_(random_records(len(buffer), width, tail, buffer.device, generator))


def positions(context: int, width: int) -> list[int]:
    """Return where the samples of a context stand, one behind the other."""
    return list(range(context, context + SPAN, width))


def counted_positions(context: int, width: int) -> list[int]:
    """Return some of them, all over."""
    places = positions(context, width)
    return places[:: max(1, len(places) // COUNTED)][:COUNTED]


@contextmanager
def rig(asked: Asked, *, rows: int = SPAN + MAX_ROWS, counts: bool = True) -> Iterator[Rig]:
    """Make the weights and the engine, and free them.

    Args:
        rows: that fit behind the longest context at least.
        counts: find out how many experts forwards visit.

    Raises:
        RequestError: no such device, shape or width.
        CheckpointError: a field of the shape has a value that the engine does not run.
        NotEnoughMemory: the weights are larger than what a GPU has free.
    """
    devices = named.devices_of(asked.devices, asked.placement)
    asked.require_widths()
    config, max_seq = asked.config(), asked.room(max(rows, SPAN + MAX_ROWS))
    copy_tb_s = copy_rate(devices[0])
    ranks, load_s = made_weights(asked, config, devices)
    if asked.routes == "measured":
        ranks = _routed(ranks, config, asked)
    asked = replace(asked, graphs=asked.graphs and devices[0].type == "cuda")
    facts = ran(
        asked, config, devices=names_of(devices), shared=shared(asked, ranks), max_seq=max_seq, load_s=load_s,
        copy_tb_s=copy_tb_s, resident_bytes=tuple(weights.resident_bytes for weights in ranks),
    )  # fmt: skip
    made = Rig(asked, ranks, config, traffic_of(config, len(devices), _kind(asked, devices)), facts, counts=counts)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def replayed(made: Rig) -> Iterator[Rig]:
    """Make another engine on the weights of one of free routes, whose layers look their experts up in tables."""
    asked = replace(made.asked, routes="measured", form="exact")
    ranks = _routed(made._ranks, made._config, asked)
    other = Rig(asked, ranks, made._config, made.traffic, replace(made.facts, routes="measured"), counts=False)
    try:
        yield other
    finally:
        other.close()


@contextmanager
def launching(made: Rig) -> Iterator[Rig]:
    """Make another engine on the same weights that launches kernel by kernel."""
    asked, facts = replace(made.asked, graphs=False), replace(made.facts, graphs=False)
    other = Rig(asked, made._ranks, made._config, made.traffic, facts, counts=False)
    try:
        yield other
    finally:
        other.close()


def _routed(ranks: Sequence[RankWeights], config: ModelConfig, asked: Asked) -> list[RankWeights]:
    tables = replayed_tables(config, min(ROUTED_POSITIONS, config.vocab_size), seed=asked.seed)
    return [with_routes(weights, tables) for weights in ranks]


def made_weights(
    asked: Asked, config: ModelConfig, devices: Sequence[torch.device], on_progress: Progress | None = None
) -> tuple[Sequence[RankWeights], float]:
    """Make the weights on the devices, tensor by tensor; return them, and the seconds that it took."""
    reader = SyntheticReader(config, seed=asked.seed, device=devices[0])
    started = time.perf_counter()
    kind = _kind(asked, devices)
    ranks = load_ranks(reader, devices, kind=kind, drafter=asked.drafter, source=reader, on_progress=on_progress)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return ranks, time.perf_counter() - started


def shared(asked: Asked, ranks: Sequence[RankWeights]) -> str:
    """Say how the GPUs share the model."""
    devices = [weights.device for weights in ranks]
    if len(ranks) == 1:
        return "one has everything"
    if _kind(asked, devices) == TENSOR:
        return f"{TENSOR}: each has its share of every layer"
    _, why = _placed(asked, devices)
    counts = ", ".join(str(len(weights.layers)) for weights in ranks)
    return f"{PIPELINE}: {counts} layers, one after the other{f'; {why}' if why else ''}"


def _placed(asked: Asked, devices: Sequence[torch.device]) -> tuple[SharedKind, str]:
    return placed([device.index or 0 for device in devices], asked.placement)


def _kind(asked: Asked, devices: Sequence[torch.device]) -> SharedKind:
    return _placed(asked, devices)[0]


def traffic_of(config: ModelConfig, ranks: int, kind: SharedKind) -> Traffic:
    """Return what the rank that reads the most reads; of ranks that run one after the other, all of them together."""
    if kind == PIPELINE:
        ranks = 1
    entries = {name: entry for name, entry in SyntheticReader(config).entries.items() if not name.startswith("mtp.")}
    placement = place(config, entries, ranks=ranks, kind="tensor" if ranks > 1 else "single")
    return max((Traffic.of(placement, rank) for rank in range(ranks)), key=lambda one: one.dense + one.per_expert)


def with_routes(weights: RankWeights, tables: dict[str, Table]) -> RankWeights:
    """Let every layer of the trunk take its experts from a table by token; a drafter's blocks hold no such tokens."""
    layers = []
    for number, layer in zip(weights.span, weights.layers, strict=True):
        table = torch.from_numpy(tables[f"layers.{number}"]).to(weights.device)
        layers.append(replace(layer, experts=replace(layer.experts, bias=None, table=table)))
    return replace(weights, layers=tuple(layers))


@contextmanager
def _noted_routes() -> Iterator[list[Tensor]]:
    """Yield a list that gets the experts [T, K] of every layer that is launched inside."""
    chosen: list[Tensor] = []
    launch = route.route

    def noting(*args: object, **options: object) -> tuple[Tensor, Tensor]:
        found = launch(*args, **options)  # type: ignore[arg-type]
        chosen.append(found[0].clone())
        return found

    with patch.object(route, "route", noting):
        yield chosen
