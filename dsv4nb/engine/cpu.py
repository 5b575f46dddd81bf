"""CpuEngine: the protocol on a CPU, in float32, with the twins as its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.contract import Contract
from dsv4nb.engine.blocks import Pools
from dsv4nb.engine.cache import layout, state_bytes
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
from dsv4nb.engine.drafter import Drafter
from dsv4nb.engine.forward import Forward
from dsv4nb.engine.holdings import Holdings
from dsv4nb.engine.memory import DeviceBytes
from dsv4nb.engine.prefill import chunk_plan
from dsv4nb.engine.protocol import ChooseDraft, DecodeState, Prefilled, Proposal, Snapshot
from dsv4nb.engine.rings import DraftRings
from dsv4nb.engine.snapshot import CpuSnapshot, capture_state, dump_arrays, load_arrays, restore_state
from dsv4nb.engine.state import CpuState
from dsv4nb.engine.taps import Taps
from dsv4nb.errors import EngineError
from dsv4nb.weights.loader import load_weights
from dsv4nb.weights.progress import Progress
from dsv4nb.weights.store import Weights


class CpuEngine:
    """Runs the network on a CPU.

    A row's logits and cache rows are the same bits in a prompt however it is cut, alone, and in a verify batch.

    Args:
        weights: as `load_weights` returns them; shared, never written.
        contract: the roundings; activations must be float32.
        max_seq: positions a state has room for.
        threads: of one operation.

    Attributes:
        draft_fault: why the checkpoint's drafter does not run, "" when nothing is wrong with it.

    Raises:
        EngineError: the contract hands over bfloat16.
    """

    def __init__(
        self, weights: Weights, config: ModelConfig, contract: Contract, *, max_seq: int = 4096, threads: int = 1
    ) -> None:
        if contract.activations != "float32":
            raise EngineError(
                f"the contract {contract.name!r} hands over {contract.activations}; the CPU engine computes in float32."
                " Use ref_fp8_round.",
                param="contract",
            )
        self._forward: Forward | None = Forward(weights, config, contract)
        self._drafter: Drafter | None = None
        if weights.drafter is not None:
            self._drafter = Drafter(weights.drafter, weights.embed, weights.head, config, contract)
        self._has_drafter = self._drafter is not None
        self.draft_fault = weights.draft_fault
        self._config, self._max_seq, self._threads = config, max_seq, threads
        self._pools = Pools(config)
        self._holdings = Holdings(self._pools, has_drafter=self._has_drafter)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        *,
        contract: Contract | None = None,
        drafter: bool = True,
        max_seq: int = 4096,
        threads: int = 1,
        on_progress: Progress | None = None,
    ) -> CpuEngine:
        """Load `checkpoint`; its own contract unless another is given, and its DSpark drafter where it has one."""
        weights = load_weights(checkpoint, drafter=drafter, on_progress=on_progress)
        return cls(weights, checkpoint.config, contract or checkpoint.contract, max_seq=max_seq, threads=threads)

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
        return 0 if self._drafter is None else self._drafter.block_size

    def new_state(self) -> CpuState:
        """Make an empty sequence at position 0."""
        with memory_errors():
            return self._holdings.state(CpuState(self._config, self._pools, self._rings()))

    def draft(self, state: DecodeState, pending: int, choose: ChooseDraft) -> Proposal:
        """Draft what may follow `pending`; see the protocol."""
        own, drafter = self._own(state), self._drafter
        require_draft(own.pos, pending, self.vocab_size, has_drafter=drafter is not None)
        assert drafter is not None and own.rings is not None
        with self._running():
            return drafter.draft(own.rings, own.pos, pending, choose)

    def prefill(
        self,
        state: DecodeState,
        tokens: Sequence[int],
        *,
        should_stop: Callable[[], bool] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Prefilled:
        """Append `tokens` to `state` in chunks and commit them; see the protocol."""
        forward, own = self._ready(state, tokens)

        def run(part: Sequence[int], is_last: bool) -> Tensor | None:
            if is_last:
                return forward.last_row(own, part)
            forward.fill(own, part)
            return None

        chunks = chunk_plan(own.pos, len(tokens))
        with self._running(), all_or_nothing(own):
            logits = run_chunks(own, tokens, chunks, run, should_stop=should_stop, on_progress=on_progress)
        assert logits is not None
        return Prefilled(logits=logits.numpy().copy(), pos=own.pos, computed=len(tokens))

    def forward_rows(self, state: DecodeState, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Run 1 … MAX_ROWS rows without committing them; see the protocol."""
        require_few_rows(tokens)
        forward, own = self._ready(state, tokens)
        with self._running(), all_or_nothing(own):
            return np.asarray(forward.rows(own, tokens).numpy()).copy()

    @contextmanager
    def tapped(self, taps: Taps) -> Iterator[None]:
        """Run the forwards inside under `taps`; see `Watchable`."""
        forward = self._open()
        before, forward.taps = forward.taps, taps
        try:
            yield
        finally:
            forward.taps = before

    def read_out(self, streams: Tensor, positions: Tensor) -> Tensor:
        """Return the logits of residual streams; see `Watchable`."""
        with self._running():
            return self._open().read_out(streams, positions)

    def commit(self, state: DecodeState, n: int) -> None:
        """Keep the first `n` rows of the last `forward_rows`."""
        own = self._own(state)
        require_commit(n, own.pending)
        own.commit(n)

    def capture(self, state: DecodeState) -> CpuSnapshot:
        """Keep what is needed to go on at state.pos; see the protocol."""
        own = self._own(state)
        with self._running():
            return self._holdings.snapshot(capture_state(own))

    def restore(self, snapshot: Snapshot) -> CpuState:
        """Make a new state at snapshot.pos; see the protocol."""
        own = self._held(snapshot)
        with self._running():
            return self._holdings.state(restore_state(own, self._rings()))

    def release(self, state: DecodeState) -> None:
        """Give the memory of `state` back; idempotent."""
        self._own(state, even_released=True).release()

    def dump(self, snapshot: Snapshot) -> dict[str, npt.NDArray[Any]]:
        """Return everything a snapshot holds as float32 arrays by name; see the protocol."""
        own = self._held(snapshot)
        with self._running():
            return dump_arrays(own)

    def load(self, arrays: Mapping[str, npt.NDArray[Any]], pos: int) -> CpuSnapshot:
        """Make a snapshot of what `dump` returned; see the protocol."""
        require_pos(pos, self._max_seq)
        with self._running():
            return self._holdings.snapshot(load_arrays(arrays, pos, self._config, self._pools, self._rings))

    def layout(self) -> str:
        """Say how `dump` lays a sequence out; see the protocol."""
        return layout(self._config, has_drafter=self._has_drafter)

    def state_bytes(self, positions: int) -> dict[str, int]:
        """Return the bytes of one state per class of cache; see the protocol."""
        return state_bytes(self._config, positions, has_drafter=self._has_drafter)

    def cache_bytes(self) -> tuple[DeviceBytes, ...]:
        """Return what the caches take, at this moment; any thread may ask."""
        return (self._holdings.count("CPU"),)

    @property
    def blocks_in_use(self) -> int:
        """Blocks of entries that some state or snapshot holds."""
        return self._pools.in_use

    def close(self) -> None:
        """Free the weights; idempotent."""
        self._forward = self._drafter = None

    def _rings(self) -> DraftRings | None:
        return DraftRings(self._config, self._make_rows) if self._has_drafter else None

    def _make_rows(self, taps: Tensor, first: int) -> Tensor:
        if self._drafter is None:
            raise EngineError("the engine is closed")
        with self._running():
            return self._drafter.make_rows(taps, first)

    def _ready(self, state: DecodeState, tokens: Sequence[int]) -> tuple[Forward, CpuState]:
        """Check a call before anything is touched."""
        forward, own = self._open(), self._own(state)
        require_tokens(tokens, own.pos, self._max_seq, self.vocab_size)
        return forward, own

    def _open(self) -> Forward:
        if self._forward is None:
            raise EngineError("the engine is closed")
        return self._forward

    def _own(self, state: DecodeState, *, even_released: bool = False) -> CpuState:
        return require_state(state, CpuState, lambda own: own.pools is self._pools, even_released=even_released)

    def _held(self, snapshot: Snapshot) -> CpuSnapshot:
        return require_snapshot(snapshot, CpuSnapshot, lambda own: own.pools is self._pools)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Compute without gradients and with the engine's thread count, which is put back after."""
        before = torch.get_num_threads()
        if before != self._threads:
            torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode(), memory_errors():
                yield
        finally:
            if before != self._threads:
                torch.set_num_threads(before)
