"""DeviceEngine: the protocol on a GPU, in bfloat16 between the roundings, with the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.contract import CONTRACTS, Contract
from dsv4nb.engine import device_state
from dsv4nb.engine.checks import (
    all_or_nothing,
    memory_errors,
    require_commit,
    require_draft,
    require_few_rows,
    require_pos,
    require_snapshot,
    require_state,
    require_tokens,
    run_chunks,
)
from dsv4nb.engine.device_caches import Caches, device_layout, device_state_bytes
from dsv4nb.engine.device_state import DeviceSnapshot, DeviceState, Shelf
from dsv4nb.engine.holdings import Living
from dsv4nb.engine.memory import ClassBytes, DeviceBytes
from dsv4nb.engine.pair_forward import PairForward
from dsv4nb.engine.prefill import (
    FAST_ROWS,
    FAST_ROWS_MAX,
    FEWEST_ROWS,
    FORMS,
    PrefillForm,
    chunk_plan,
    fast_plan,
    is_fast,
)
from dsv4nb.engine.protocol import MAX_ROWS, ChooseDraft, DecodeState, Prefilled, Proposal, Snapshot
from dsv4nb.engine.rank_chunk import RankChunk
from dsv4nb.engine.rank_forward import RankForward
from dsv4nb.errors import EngineError
from dsv4nb.weights.kernel_shapes import chunk_fault
from dsv4nb.weights.progress import Progress
from dsv4nb.weights.rank_loader import load_ranks
from dsv4nb.weights.rank_store import RankWeights

NO_PAIR_CHUNKS = "two GPUs read prompts in decode rows"
NO_PAIR_DRAFTER = "two GPUs do not draft yet; they decode plainly"


def bf16_contract(contract: Contract) -> Contract:
    """Return the contract that kernels keep where `contract` is asked for: the same roundings, bfloat16 between them.

    Raises:
        EngineError: it leaves the inputs of FP8 products unrounded.
    """
    if not contract.act_fp8:
        raise EngineError(
            f"the contract {contract.name!r} does not round the inputs of FP8 products; the kernels do. devices='cpu'"
            " runs it, or leave contract= out",
            param="contract",
        )
    if contract.activations == "bfloat16":
        return contract
    wanted = replace(contract, activations="bfloat16")
    for named in CONTRACTS.values():
        if replace(named, name=contract.name) == wanted:
            return named
    return replace(wanted, name=f"{contract.name}_bf16")


def _require_pair_at_most(ranks: int) -> None:
    if not 1 <= ranks <= 2:
        raise EngineError(f"{ranks} GPUs; the GPU engine runs on one or on two", param="devices")


def require_prefill(prefill: str, chunk_rows: int) -> None:
    """Refuse a way of reading prompts that there is not.

    Raises:
        EngineError: the form has another name, or a chunk another number of rows.
    """
    if prefill not in FORMS:
        raise EngineError(f"prefill is {prefill!r}; it must be one of {', '.join(FORMS)}", param="prefill")
    if not FEWEST_ROWS <= chunk_rows <= FAST_ROWS_MAX:
        raise EngineError(
            f"a chunk of {chunk_rows} rows; it must have from {FEWEST_ROWS} to {FAST_ROWS_MAX}", param="prefill_rows"
        )


class DeviceEngine:
    """Runs the network on one GPU, or on two that share the weights.

    A row's logits and cache rows are the same bits alone and in a verify batch, and with prefill="exact" in a prompt
    however it is cut: there it takes the way of decode rows, eight at a time. With "fast" most of a prompt goes through
    the kernels of whole chunks, which add in another order; the same cut is the same bits again. States have caches of
    their own for `max_seq` positions; snapshots copy what they need.

    Args:
        ranks: as `load_ranks` returns them, one or two; shared, never written.
        contract: the roundings; bfloat16 is handed over between them, whatever it says.
        max_seq: positions a state has room for.
        graphs: replay captured CUDA graphs; without, every kernel is launched each time.
        prefill: how prompts are read, "fast" where this model can be, or "exact".
        chunk_rows: rows of one fast chunk, from 32 to 4096.

    Attributes:
        prefill_form: how prompts are read; prefill_fault: why that is "exact" though "fast" was asked for, else "".
        ranks: the weights; none once it is closed.
        contract: the roundings that it keeps.
        draft_fault: why the checkpoint's drafter does not run, "" when it has none.

    Raises:
        EngineError: the contract is none that the kernels keep, an option none that there is, or there are more ranks.
        ValueError: two GPUs do not reach each other's memory.
    """

    def __init__(
        self,
        ranks: Sequence[RankWeights],
        config: ModelConfig,
        contract: Contract,
        *,
        max_seq: int = 4096,
        graphs: bool = True,
        prefill: PrefillForm = "fast",
        chunk_rows: int = FAST_ROWS,
    ) -> None:
        require_prefill(prefill, chunk_rows)
        self.ranks = tuple(ranks)
        self.contract = bf16_contract(contract)
        self.draft_fault = ranks[0].draft_fault
        if len(ranks) > 1 and config.dspark is not None:
            self.draft_fault = self.draft_fault or NO_PAIR_DRAFTER
        self._config, self._max_seq, self._devices = config, max_seq, tuple(weights.device for weights in ranks)
        with torch.inference_mode():
            self._forward: RankForward | PairForward | None = self._forward_of(ranks, graphs=graphs)
        self.prefill_fault = "" if prefill == "exact" else self._chunk_fault(ranks)
        self.prefill_form: PrefillForm = "exact" if self.prefill_fault else prefill
        self._chunks: RankChunk | None = None
        if self.prefill_form == "fast" and isinstance(self._forward, RankForward):
            with self._running():
                self._chunks = self._forward.chunks(chunk_rows)
        drafter = self._forward.drafter
        self._block_size = 0 if drafter is None else drafter.block_size
        self._shelf = Shelf(config, max_seq, self._devices, self._make_context if self._block_size else None)
        self._living: Living[DeviceState, DeviceSnapshot] = Living()

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        *,
        device: torch.device | str | Sequence[torch.device | str] = "cuda",
        contract: Contract | None = None,
        drafter: bool = True,
        max_seq: int = 4096,
        prefill: PrefillForm = "fast",
        chunk_rows: int = FAST_ROWS,
        on_progress: Progress | None = None,
    ) -> DeviceEngine:
        """Load `checkpoint`; its own contract unless another is given, and its DSpark drafter where it has one.

        Two devices share the weights, and draft nothing.
        """
        asked = contract or checkpoint.contract
        bf16_contract(asked)  # refuse before anything is read
        require_prefill(prefill, chunk_rows)
        devices = [device] if isinstance(device, torch.device | str) else list(device)
        _require_pair_at_most(len(devices))
        places = [torch.device(place) for place in devices]
        ranks = load_ranks(checkpoint, places, drafter=drafter and len(places) == 1, on_progress=on_progress)
        return cls(ranks, checkpoint.config, asked, max_seq=max_seq, prefill=prefill, chunk_rows=chunk_rows)

    @property
    def config(self) -> ModelConfig:
        """What the checkpoint says of the network."""
        return self._config

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def max_seq(self) -> int:
        return self._max_seq

    @property
    def block_size(self) -> int:
        return 0 if self._forward is None else self._block_size

    def new_state(self) -> DeviceState:
        """Make an empty sequence at position 0."""
        with self._running():
            return self._living.state(DeviceState(self._shelf))

    def draft(self, state: DecodeState, pending: int, choose: ChooseDraft) -> Proposal:
        """Draft what may follow `pending`; see the protocol."""
        own, drafter = self._own(state), self._open().drafter
        require_draft(own.pos, pending, self.vocab_size, has_drafter=drafter is not None)
        assert drafter is not None
        with self._running():
            own.catch_up()
            return drafter.draft(own.caches, own.pos, pending, choose)

    def prefill(
        self,
        state: DecodeState,
        tokens: Sequence[int],
        *,
        should_stop: Callable[[], bool] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Prefilled:
        """Append `tokens` to `state`, in chunks or eight rows at a time, and commit them; see the protocol.

        Of a fast prompt one chunk may be on its way when progress is told and `should_stop` is asked.
        """
        forward, own, fast = *self._ready(state, tokens), self._chunks

        def run(part: Sequence[int], is_last: bool) -> npt.NDArray[np.float32] | None:
            if fast is not None and is_fast(len(part)):
                return fast.run(own.caches, part, own.pos, has_head=is_last)
            steps = chunk_plan(own.pos, len(part), MAX_ROWS)
            for first, last in steps[:-1] if is_last else steps:
                forward.fill(own.caches, part[first:last], own.pos + first)
            first, last = steps[-1]
            if is_last:
                return forward.rows(own.caches, part[first:last], own.pos + first)
            forward.settle()
            return None

        chunks = chunk_plan(own.pos, len(tokens)) if fast is None else fast_plan(len(tokens), fast.most)
        own.pending = 0
        with self._running(), all_or_nothing(own):
            logits = run_chunks(own, tokens, chunks, run, should_stop=should_stop, on_progress=on_progress)
        assert logits is not None
        return Prefilled(logits=logits[-1].copy(), pos=own.pos, computed=len(tokens))

    def forward_rows(self, state: DecodeState, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Run 1 … MAX_ROWS rows without committing them; see the protocol."""
        require_few_rows(tokens)
        forward, own = self._ready(state, tokens)
        own.pending = 0
        with self._running():
            logits = forward.rows(own.caches, tokens, own.pos)
        own.pending = len(tokens)
        return logits

    def commit(self, state: DecodeState, n: int) -> None:
        """Keep the first `n` rows of the last `forward_rows`."""
        own = self._own(state)
        require_commit(n, own.pending)
        own.commit(n)

    def capture(self, state: DecodeState) -> DeviceSnapshot:
        """Copy what is needed to go on at state.pos, entries included; see the protocol."""
        own = self._own(state)
        with self._running():
            parts = [(part, rows) for part, rows in own.live()]
        return self._living.snapshot(DeviceSnapshot(self._shelf, own.pos, parts))

    def restore(self, snapshot: Snapshot) -> DeviceState:
        """Make a new state at snapshot.pos; see the protocol."""
        own = self._held(snapshot)
        with self._running():
            return self._living.state(device_state.restore(own))

    def release(self, state: DecodeState) -> None:
        """Give the memory of `state` back; idempotent."""
        self._own(state, even_released=True).release()

    def dump(self, snapshot: Snapshot) -> dict[str, npt.NDArray[Any]]:
        """Return everything a snapshot holds: bfloat16 rows as uint16, source rows as float32; see the protocol."""
        own = self._held(snapshot)
        with self._running():
            return device_state.dump(own)

    def load(self, arrays: Mapping[str, npt.NDArray[Any]], pos: int) -> DeviceSnapshot:
        """Make a snapshot of what `dump` returned; see the protocol."""
        require_pos(pos, self._max_seq)
        with self._running():
            return self._living.snapshot(device_state.load(arrays, pos, self._shelf, self._devices[0]))

    def layout(self) -> str:
        """Say how `dump` lays a sequence out; see the protocol."""
        return device_layout(self._config, has_drafter=self._shelf.has_drafter)

    def state_bytes(self, positions: int) -> dict[str, int]:
        """Return the bytes of one state per class of cache; see the protocol."""
        return device_state_bytes(self._config, positions, has_drafter=self._shelf.has_drafter)

    def cache_bytes(self) -> tuple[DeviceBytes, ...]:
        """Return what the caches take, and what fast prompts do, as a class of its own; any thread may ask."""
        states, snapshots = self._living.both()
        held = [snapshots, *([] for _ in self._devices[1:])]  # copies are of the first GPU's caches
        counted = tuple(
            device_state.count(str(device), self._shelf, states, copies, self._max_seq)
            for device, copies in zip(self._devices, held, strict=True)
        )
        if (fast := self._chunks) is None:
            return counted
        own = ClassBytes(used=0, reserved=fast.nbytes)
        return tuple(replace(one, classes={**one.classes, "prefill": own}) for one in counted)

    @property
    def blocks_in_use(self) -> int:
        """Blocks of entries that states and snapshots fill; each has copies of its own."""
        states, snapshots = self._living.both()
        return sum(state.blocks for state in states) + sum(snapshot.blocks for snapshot in snapshots)

    def close(self) -> None:
        """Free the weights and the caches that no state holds; idempotent."""
        self._forward, self._chunks, self.ranks = None, None, ()
        self._shelf.clear()

    def _make_context(self, caches: Caches, first: int, stop: int) -> None:
        drafter = self._open().drafter
        assert drafter is not None
        with self._running():
            drafter.write_context(caches, first, stop)

    def _forward_of(self, ranks: Sequence[RankWeights], *, graphs: bool) -> RankForward | PairForward:
        _require_pair_at_most(len(ranks))
        run = (self._config, self.contract, self._max_seq)
        if len(ranks) == 1:
            return RankForward(ranks[0], *run, graphs=graphs)
        return PairForward((ranks[0], ranks[1]), *run, graphs=graphs)

    def _chunk_fault(self, ranks: Sequence[RankWeights]) -> str:
        return NO_PAIR_CHUNKS if len(ranks) > 1 else chunk_fault(self._config, ranks[0].shapes)

    def _ready(self, state: DecodeState, tokens: Sequence[int]) -> tuple[RankForward | PairForward, DeviceState]:
        """Check a call before anything is touched."""
        forward, own = self._open(), self._own(state)
        require_tokens(tokens, own.pos, self._max_seq, self.vocab_size)
        return forward, own

    def _open(self) -> RankForward | PairForward:
        if self._forward is None:
            raise EngineError("the engine is closed")
        return self._forward

    def _own(self, state: DecodeState, *, even_released: bool = False) -> DeviceState:
        return require_state(state, DeviceState, lambda own: own.shelf is self._shelf, even_released=even_released)

    def _held(self, snapshot: Snapshot) -> DeviceSnapshot:
        return require_snapshot(snapshot, DeviceSnapshot, lambda own: own.shelf is self._shelf)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Compute without gradients, on the rank's stream."""
        with torch.inference_mode(), memory_errors(), self._open().running():
            yield
