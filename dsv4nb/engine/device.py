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
    require_few_rows,
    require_pos,
    require_snapshot,
    require_state,
    require_tokens,
    run_chunks,
)
from dsv4nb.engine.device_caches import device_layout, device_state_bytes
from dsv4nb.engine.device_state import DeviceSnapshot, DeviceState, Shelf
from dsv4nb.engine.holdings import Living
from dsv4nb.engine.memory import DeviceBytes
from dsv4nb.engine.prefill import chunk_plan
from dsv4nb.engine.protocol import MAX_ROWS, ChooseDraft, DecodeState, Prefilled, Proposal, Snapshot
from dsv4nb.engine.rank_forward import RankForward
from dsv4nb.errors import EngineError
from dsv4nb.weights.progress import Progress
from dsv4nb.weights.rank_loader import load_ranks
from dsv4nb.weights.rank_store import RankWeights

NO_DRAFTER = "the GPU engine does not draft yet; it decodes plainly"


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


class DeviceEngine:
    """Runs the network on one GPU.

    A row's logits and cache rows are the same bits in a prompt however it is cut, alone, and in a verify batch: a
    prompt takes the way of decode rows, eight at a time. States have caches of their own for `max_seq` positions;
    snapshots copy what they need.

    Args:
        ranks: as `load_ranks` returns them, one; shared, never written.
        contract: the roundings; bfloat16 is handed over between them, whatever it says.
        max_seq: positions a state has room for.
        graphs: replay captured CUDA graphs; without, every kernel is launched each time.

    Attributes:
        ranks: the weights; none once it is closed.
        contract: the roundings that it keeps.
        draft_fault: why the checkpoint's drafter does not run, "" when it has none.

    Raises:
        EngineError: the contract is none that the kernels keep.
    """

    def __init__(
        self,
        ranks: Sequence[RankWeights],
        config: ModelConfig,
        contract: Contract,
        *,
        max_seq: int = 4096,
        graphs: bool = True,
        draft_fault: str = "",
    ) -> None:
        (weights,) = ranks
        self.ranks = tuple(ranks)
        self.contract = bf16_contract(contract)
        self.draft_fault = draft_fault
        self._config, self._max_seq, self._device = config, max_seq, weights.device
        with torch.inference_mode():
            self._forward: RankForward | None = RankForward(weights, config, self.contract, max_seq, graphs=graphs)
        self._shelf = Shelf(config, max_seq, weights.device)
        self._living: Living[DeviceState, DeviceSnapshot] = Living()

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        *,
        device: torch.device | str = "cuda",
        contract: Contract | None = None,
        max_seq: int = 4096,
        on_progress: Progress | None = None,
    ) -> DeviceEngine:
        """Load `checkpoint`; with the roundings of its own contract unless another is given."""
        asked = contract or checkpoint.contract
        bf16_contract(asked)  # refuse before anything is read
        ranks = load_ranks(checkpoint, [torch.device(device)], on_progress=on_progress)
        fault = NO_DRAFTER if checkpoint.drafter == "dspark" else ""
        return cls(ranks, checkpoint.config, asked, max_seq=max_seq, draft_fault=fault)

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
        return 0

    def new_state(self) -> DeviceState:
        """Make an empty sequence at position 0."""
        with self._running():
            return self._living.state(DeviceState(self._shelf))

    def draft(self, state: DecodeState, pending: int, choose: ChooseDraft) -> Proposal:
        """Refuse: there is no drafter on a GPU yet."""
        self._own(state)
        raise EngineError(f"nothing to draft with: {NO_DRAFTER}. block_size is 0", param="drafter")

    def prefill(
        self,
        state: DecodeState,
        tokens: Sequence[int],
        *,
        should_stop: Callable[[], bool] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Prefilled:
        """Append `tokens` to `state`, eight rows at a time, and commit them; see the protocol."""
        forward, own = self._ready(state, tokens)

        def run(part: Sequence[int], is_last: bool) -> npt.NDArray[np.float32] | None:
            steps = chunk_plan(own.pos, len(part), MAX_ROWS)
            for first, last in steps[:-1] if is_last else steps:
                forward.fill(own.caches, part[first:last], own.pos + first)
            first, last = steps[-1]
            return forward.rows(own.caches, part[first:last], own.pos + first) if is_last else None

        chunks = chunk_plan(own.pos, len(tokens))
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
            return self._living.snapshot(device_state.load(arrays, pos, self._shelf, self._device))

    def layout(self) -> str:
        """Say how `dump` lays a sequence out; see the protocol."""
        return device_layout(self._config)

    def state_bytes(self, positions: int) -> dict[str, int]:
        """Return the bytes of one state per class of cache; see the protocol."""
        return device_state_bytes(self._config, positions)

    def cache_bytes(self) -> tuple[DeviceBytes, ...]:
        """Return what the caches take, at this moment; any thread may ask."""
        return (device_state.count(str(self._device), self._shelf, *self._living.both(), self._max_seq),)

    @property
    def blocks_in_use(self) -> int:
        """Blocks of entries that states and snapshots fill; each has copies of its own."""
        states, snapshots = self._living.both()
        return sum(state.blocks for state in states) + sum(snapshot.blocks for snapshot in snapshots)

    def close(self) -> None:
        """Free the weights and the caches that no state holds; idempotent."""
        self._forward, self.ranks = None, ()
        self._shelf.clear()

    def _ready(self, state: DecodeState, tokens: Sequence[int]) -> tuple[RankForward, DeviceState]:
        """Check a call before anything is touched."""
        forward, own = self._open(), self._own(state)
        require_tokens(tokens, own.pos, self._max_seq, self.vocab_size)
        return forward, own

    def _open(self) -> RankForward:
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
