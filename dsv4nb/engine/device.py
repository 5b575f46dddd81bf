"""DeviceEngine: the protocol on a GPU, in bfloat16 between the roundings, with the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.checkpoint.opening import Checkpoint
from dsv4nb.config import SamplerConfig
from dsv4nb.contract import Contract
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
from dsv4nb.engine.device_asked import bf16_contract, require_prefill
from dsv4nb.engine.device_caches import Caches, device_layout, device_state_bytes, share_of
from dsv4nb.engine.device_forward import DeviceChunk, DeviceForward, forward_of, kind_of, require_ranks
from dsv4nb.engine.device_memory import count, largest_state, with_shared
from dsv4nb.engine.device_state import DeviceSnapshot, DeviceState, Shelf
from dsv4nb.engine.gpus import give_back
from dsv4nb.engine.holdings import Living
from dsv4nb.engine.memory import DeviceBytes
from dsv4nb.engine.peer_link import PeerLink, sound_links
from dsv4nb.engine.plain_choice import PlainChoice
from dsv4nb.engine.prefill import FAST_ROWS, PrefillForm, chunk_plan, fast_plan, is_fast
from dsv4nb.engine.protocol import MAX_ROWS, ChooseDraft, DecodeState, Prefilled, Proposal, Snapshot, Verified
from dsv4nb.engine.rank_draws import can_draw_from
from dsv4nb.engine.run_ahead import Asked, RunAhead
from dsv4nb.errors import EngineError
from dsv4nb.weights.kernel_shapes import chunk_fault
from dsv4nb.weights.placement import SharedKind
from dsv4nb.weights.progress import Progress
from dsv4nb.weights.rank_loader import load_ranks
from dsv4nb.weights.rank_store import RankWeights


class DeviceEngine:
    """Runs the network on one GPU, on two that share every layer, or on several one after the other.

    A row's logits and cache rows are the same bits alone and in a verify batch, and with prefill="exact" in a prompt
    however it is cut: there it takes the way of decode rows, eight at a time. With "fast" most of a prompt goes through
    the kernels of whole chunks, which add in another order; the same cut is the same bits again. States have caches of
    their own, which grow up to `max_seq` positions; snapshots copy what they need. What the plain sampler chooses is
    chosen on the GPU, and its rows come to the host when somebody looks at one. Where a plain step or a round follows
    another one, the next is begun before it is asked for: see `run_ahead`.

    Args:
        ranks: as `load_ranks` returns them; shared, never written.
        contract: the roundings; bfloat16 is handed over between them, whatever it says.
        max_seq: the most positions of a state.
        graphs: replay captured CUDA graphs; without, every kernel is launched each time.
        prefill: how prompts are read, "fast" where this model can be, or "exact".
        chunk_rows: rows of one fast chunk, from 32 to 4096.
        links: of the GPUs, where they were tested; tested here when None.
        run_ahead: begin steps and rounds before they are asked for.

    Attributes:
        prefill_form: how prompts are read; prefill_fault: why that is "exact" though "fast" was asked for, else "".
        ranks: the weights; none once it is closed.
        contract: the roundings that it keeps.
        draft_fault: why the checkpoint's drafter does not run, "" when it has none.
        placement: where the weights are: "single", "tensor" or "pipeline".
        links: between neighbours, each found sound.

    Raises:
        EngineError: the contract is none that the kernels keep, an option none that there is, more than two ranks
            share every layer, or something that one GPU sends does not arrive on the other one.
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
        links: Sequence[PeerLink] | None = None,
        run_ahead: bool = True,
    ) -> None:
        require_prefill(prefill, chunk_rows)
        self.ranks = tuple(ranks)
        self.contract = bf16_contract(contract)
        self.draft_fault = ranks[0].draft_fault
        self._config, self._max_seq, self.placement = config, max_seq, kind_of(ranks, config)
        self._ahead = RunAhead(is_on=run_ahead, max_seq=max_seq)
        if links is None:
            links = sound_links([weights.device for weights in ranks], joins=self.placement == "tensor")
        self.links = tuple(links)
        with torch.inference_mode():
            self._forward: DeviceForward | None = forward_of(ranks, config, self.contract, max_seq, graphs=graphs)
        self.prefill_fault = "" if prefill == "exact" else self._chunk_fault(ranks)
        self.prefill_form: PrefillForm = "exact" if self.prefill_fault else prefill
        self._chunks: DeviceChunk | None = None
        if self.prefill_form == "fast":
            with self._running():
                self._chunks = self._forward.chunks(chunk_rows)
        drafter = self._forward.drafter
        self._block_size = 0 if drafter is None else drafter.block_size
        make_context = self._make_context if self._block_size else None
        shares = [share_of(weights, kv_fp8=self.contract.kv_fp8) for weights in ranks]
        self._shelf = Shelf(config, max_seq, shares, make_context)
        self._living: Living[DeviceState, DeviceSnapshot] = Living()

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        *,
        device: torch.device | str | Sequence[torch.device | str] = "cuda",
        placement: SharedKind = "tensor",
        contract: Contract | None = None,
        drafter: bool = True,
        max_seq: int = 4096,
        prefill: PrefillForm = "fast",
        chunk_rows: int = FAST_ROWS,
        on_progress: Progress | None = None,
    ) -> DeviceEngine:
        """Load `checkpoint`; its own contract unless another is given, and its DSpark drafter where it has one.

        Args:
            placement: of several devices: "tensor", two share every layer and the first one drafts; or "pipeline", each
                runs some of the layers, one after the other, and the last one drafts.
        """
        asked = contract or checkpoint.contract
        bf16_contract(asked)  # refuse before anything is read
        require_prefill(prefill, chunk_rows)
        devices = [device] if isinstance(device, torch.device | str) else list(device)
        require_ranks(len(devices), placement)
        places = [torch.device(place) for place in devices]
        links = sound_links(places, joins=placement == "tensor")
        ranks = load_ranks(checkpoint, places, kind=placement, drafter=drafter, on_progress=on_progress)
        return cls(
            ranks, checkpoint.config, asked, max_seq=max_seq, prefill=prefill, chunk_rows=chunk_rows, links=links
        )

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

    @property
    def run_ahead(self) -> bool:
        """Whether steps and rounds are begun before they are asked for; may be set between two calls."""
        return self._ahead.is_on

    @run_ahead.setter
    def run_ahead(self, is_on: bool) -> None:
        self._ahead.is_on = is_on

    @property
    def chunk_rows(self) -> int:
        """Rows of the longest fast chunk, 0 where prompts are read exactly."""
        return 0 if self._chunks is None else self._chunks.most

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
            own.grow(own.pos + len(tokens))
            logits = run_chunks(own, tokens, chunks, run, should_stop=should_stop, on_progress=on_progress)
        assert logits is not None
        return Prefilled(logits=logits[-1].copy(), pos=own.pos, computed=len(tokens))

    def forward_rows(self, state: DecodeState, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Run 1 … MAX_ROWS rows without committing them; see the protocol."""
        with self._running_rows(state, tokens) as (forward, own):
            return forward.rows(own.caches, tokens, own.pos)

    def draw_rows(self, state: DecodeState, tokens: Sequence[int], config: SamplerConfig) -> Verified:
        """Run rows likewise, and choose from each on the GPU; see the protocol."""
        if not can_draw_from(self.vocab_size):
            return Verified(rows=tuple(self.forward_rows(state, tokens)))
        step = Asked(rows=1, config=config) if len(tokens) == 1 else None
        with self._running_rows(state, tokens, step) as (forward, own):
            if step is not None:
                return self._ahead.run(forward, own, tokens[0], step)[1]
            return forward.draw(own.caches, tokens, own.pos, config).land()

    def draft_and_draw(
        self, state: DecodeState, pending: int, rows: int, *, drafts_by: SamplerConfig, config: SamplerConfig
    ) -> tuple[Proposal, Verified]:
        """Draft, and run and choose without waiting for the drafts; see the protocol."""
        rows = min(rows, self.block_size + 1)
        if not can_draw_from(self.vocab_size):
            proposal = self.draft(state, pending, PlainChoice(config=drafts_by, first=state.pos + 1))
            return proposal, self.draw_rows(state, (pending, *proposal.ids[: rows - 1]), config)
        drafter = self._open().drafter
        require_draft(self._own(state).pos, pending, self.vocab_size, has_drafter=drafter is not None)
        asked = Asked(rows=rows, config=config, drafts_by=drafts_by)
        with self._running_rows(state, [pending] * rows, asked) as (forward, own):
            drafted, verified = self._ahead.run(forward, own, pending, asked)
        assert drafted is not None
        return drafted, verified

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

    def blank(self, state: DecodeState) -> None:
        """Leave nothing of a sequence in the caches of `state`, which is to be released."""
        own = self._own(state)
        with self._running():
            own.caches.blank()

    def compile(self, state: DecodeState, positions: int) -> None:
        """Compile what only forwards so far down launch, ahead of them; `state` needs no room there."""
        forward, own = self._open(), self._own(state)
        with self._running():
            forward.compile(own.caches, self._shelf.size_of(positions))

    def release(self, state: DecodeState) -> None:
        """Give the memory of `state` back; idempotent."""
        own = self._own(state, even_released=True)
        self._ahead.end()
        own.release()
        self._shelf.trim()

    def dump(self, snapshot: Snapshot) -> dict[str, npt.NDArray[Any]]:
        """Return everything a snapshot holds: records as bytes, bfloat16 as uint16, float32; see the protocol."""
        own = self._held(snapshot)
        with self._running():
            return device_state.dump(own)

    def load(self, arrays: Mapping[str, npt.NDArray[Any]], pos: int) -> DeviceSnapshot:
        """Make a snapshot of what `dump` returned; see the protocol."""
        require_pos(pos, self._max_seq)
        with self._running():
            return self._living.snapshot(device_state.load(arrays, pos, self._shelf))

    def layout(self) -> str:
        """Say how `dump` lays a sequence out; see the protocol."""
        return device_layout(self._config, kv_fp8=self.contract.kv_fp8, has_drafter=self._shelf.has_drafter)

    def state_bytes(self, positions: int) -> dict[str, int]:
        """Return the bytes of one state per class of cache, whole extents; see the protocol."""
        size = max(positions, self._shelf.size_of(positions))
        return device_state_bytes(self._config, size, kv_fp8=self.contract.kv_fp8, has_drafter=self._shelf.has_drafter)

    def largest_session(self) -> int:
        """Return the most positions, at most `max_seq`, that one more state can have now; any thread may ask."""
        return largest_state(self._shelf)

    def cache_bytes(self) -> tuple[DeviceBytes, ...]:
        """Return what the caches take, and classes of what forwards and fast prompts do; any thread may ask."""
        states, snapshots = self._living.both()
        counted = tuple(count(each, self._shelf, states, snapshots) for each in self._shelf.shares)
        for name, shared in (("prefill", self._chunks), ("forward", self._forward)):
            if shared is not None:
                counted = with_shared(counted, name, shared.nbytes)
        return counted

    @property
    def blocks_in_use(self) -> int:
        """Blocks of entries that states and snapshots fill; each has copies of its own."""
        states, snapshots = self._living.both()
        return sum(state.blocks for state in states) + sum(snapshot.blocks for snapshot in snapshots)

    def close(self) -> None:
        """Free the weights and the caches that no state holds, for other processes too; idempotent."""
        self._ahead.end()
        is_cuda = any(weights.device.type == "cuda" for weights in self.ranks)
        self._forward, self._chunks, self.ranks = None, None, ()
        self._shelf.clear()
        if is_cuda:
            give_back()

    def _make_context(self, caches: Caches, first: int, stop: int) -> None:
        drafter = self._open().drafter
        assert drafter is not None
        with self._running():
            drafter.write_context(caches, first, stop)

    def _chunk_fault(self, ranks: Sequence[RankWeights]) -> str:
        return chunk_fault(self._config, ranks[0].shapes)

    def _ready(self, state: DecodeState, tokens: Sequence[int]) -> tuple[DeviceForward, DeviceState]:
        """Check a call before anything is touched."""
        forward, own = self._open(), self._own(state)
        require_tokens(tokens, own.pos, self._max_seq, self.vocab_size)
        return forward, own

    @contextmanager
    def _running_rows(
        self, state: DecodeState, tokens: Sequence[int], asked: Asked | None = None
    ) -> Iterator[tuple[DeviceForward, DeviceState]]:
        """Check and make room for rows that what is inside runs; behind it they are pending.

        Args:
            asked: what they are, where that may have been begun ahead.
        """
        require_few_rows(tokens)
        forward, own = self._ready(state, tokens)
        own.pending = 0
        with self._running(goes_on=asked is not None and self._ahead.leads_to(own, tokens[0], asked)):
            own.grow(own.pos + len(tokens))
            yield forward, own
        own.pending = len(tokens)

    def _open(self) -> DeviceForward:
        if self._forward is None:
            raise EngineError("the engine is closed")
        return self._forward

    def _own(self, state: DecodeState, *, even_released: bool = False) -> DeviceState:
        return require_state(state, DeviceState, lambda own: own.shelf is self._shelf, even_released=even_released)

    def _held(self, snapshot: Snapshot) -> DeviceSnapshot:
        return require_snapshot(snapshot, DeviceSnapshot, lambda own: own.shelf is self._shelf)

    @contextmanager
    def _running(self, *, goes_on: bool = False) -> Iterator[None]:
        """Compute without gradients, on the rank's stream; what was begun ahead is forgotten, unless this goes on."""
        forward = self._open()
        if not goes_on:
            self._ahead.end()
        with torch.inference_mode(), memory_errors(), forward.running():
            yield
