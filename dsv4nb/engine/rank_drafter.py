"""The DSpark drafter on one GPU: a block of noise behind the pending token, read at once; `DraftWalk` goes along it.

As `drafter` (dspark.md 1, 2), through the kernels of the trunk. Context rows are made of the taps of committed
positions, eight at a time and always as eight: a row has the same bits whichever stand beside it. The rows of a block
lie behind the ring, where no position has its slot, so a stage is a layer like any other. Nothing here waits for the
device or looks at a value.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.config import SamplerConfig
from dsv4nb.contract import Contract
from dsv4nb.engine.cache import tap_width, window_rows
from dsv4nb.engine.device_caches import BLOCK_ROWS, Caches, DraftCaches
from dsv4nb.engine.draft_walk import Drafting, DraftWalk, Send
from dsv4nb.engine.graphs import Graphs
from dsv4nb.engine.lap import Lap
from dsv4nb.engine.protocol import ChooseDraft, Proposal
from dsv4nb.engine.rank_layer import Step, run_layer
from dsv4nb.engine.step import TOKENS_AT, Room, Turns, Windows
from dsv4nb.weights.kernel_shapes import PLACES, filled
from dsv4nb.weights.rank_store import RankDraft
from dsv4nb_kernels import fp8_rows, hyper_mix, norm_rope_write
from dsv4nb_kernels._expert_rows import ExpertRows
from dsv4nb_kernels._rounded_rows import RoundedRows, round_rows
from dsv4nb_kernels.fp8_rows import Fp8Matrix
from dsv4nb_kernels.hyper_mix import Boundary, HyperWeights

_ALL = 30.0  # whose sigmoid is 1 in float32


def taps_of(room: Room, config: ModelConfig, rows: int) -> Tensor:
    """Return the taps of so many rows, side by side: [T, K·D] bfloat16."""
    return room.tensor("taps", rows, tap_width(config), dtype=torch.bfloat16)


def tap(room: Room, config: ModelConfig, stream: Tensor, layer: int) -> None:
    """Launch what keeps the streams behind `layer`, [T, HC, D], among the taps, if it is a tapped one."""
    assert config.dspark is not None
    if layer in config.dspark.target_layer_ids:
        first = config.dspark.target_layer_ids.index(layer) * config.hidden_size
        torch.mean(stream, 1, out=taps_of(room, config, len(stream))[:, first : first + config.hidden_size])


class BlockInputs:
    """Where the rows of a block stand; as `StepInputs`.

    Attributes:
        given: [4 + B] int32, what the host sends: the position of the pending token, three of nothing, the tokens.
        slots: [B] int32, behind the ring.
        window: [B, W + 32] int32, what each row sees: the context, oldest first, and the whole block.
        windows: none; a stage has no compressor.
    """

    def __init__(self, config: ModelConfig, size: int, turns: Turns) -> None:
        device, width = turns.plain.device, config.sliding_window
        self._turns, self._ring, self._width = turns, window_rows(config), width
        self._steps = torch.arange(size, dtype=torch.int32, device=device)
        self._back = torch.arange(-width, 0, dtype=torch.int32, device=device)
        self._hidden = torch.empty(width, dtype=torch.bool, device=device)
        self.given = torch.zeros(TOKENS_AT + size, dtype=torch.int32, device=device)
        self.position, self.tokens = self.given[:1], self.given[TOKENS_AT:]
        self.positions = torch.empty(size, dtype=torch.int32, device=device)
        self.slots = self._ring + self._steps
        self.window = torch.full((size, width + filled(size, PLACES)), -1, dtype=torch.int32, device=device)
        self.window[:, width : width + size] = self.slots
        self._seen = torch.empty(width, dtype=torch.int32, device=device)
        self._turn = torch.empty(3, size, config.qk_rope_head_dim, device=device)
        self.windows: dict[int, Windows] = {}

    def turn(self, *, is_compressed: bool) -> Tensor:
        """Return the angles of the rows: [3, B, rd]."""
        assert not is_compressed
        return self._turn

    def refresh(self) -> None:
        """Launch what makes everything of `given`."""
        torch.add(self._steps, self.position, out=self.positions)
        torch.index_select(self._turns.plain, 1, self.positions, out=self._turn)
        torch.add(self._back, self.position, out=self._seen)
        torch.lt(self._seen, 0, out=self._hidden)
        self._seen.remainder_(self._ring).masked_fill_(self._hidden, -1)
        self.window[:, : self._width].copy_(self._seen)


class ContextInputs:
    """Where eight context rows stand.

    Attributes:
        given: [5] int32, what the host sends: the first position, three of nothing, the one behind the last.
        taps: [8] int32, slots of their taps.
        slots: [8] int32, where they go; behind the ring from the last position on.
        turn: [3, 8, rd], their angles.
    """

    def __init__(self, config: ModelConfig, turns: Turns) -> None:
        device = turns.plain.device
        self._turns, self._ring = turns, window_rows(config)
        self._steps = torch.arange(BLOCK_ROWS, dtype=torch.int32, device=device)
        self._behind = self._ring + self._steps
        self.given = torch.zeros(TOKENS_AT + 1, dtype=torch.int32, device=device)
        self._positions, self.taps, self.slots = (torch.empty_like(self._steps) for _ in range(3))
        self._is_past = torch.empty(BLOCK_ROWS, dtype=torch.bool, device=device)
        self.turn = torch.empty(3, BLOCK_ROWS, config.qk_rope_head_dim, device=device)

    def refresh(self) -> None:
        """Launch what makes everything of `given`."""
        torch.add(self._steps, self.given[:1], out=self._positions)
        torch.index_select(self._turns.plain, 1, self._positions, out=self.turn)
        torch.remainder(self._positions, self._ring, out=self.taps)
        torch.ge(self._positions, self.given[TOKENS_AT:], out=self._is_past)
        torch.where(self._is_past, self._behind, self.taps, out=self.slots)


class RankDrafter:
    """The drafter of one GPU.

    Args:
        draft: whole, with the trunk's embedding and head.
        turns: with room for a block behind the last position.
        room: of the trunk; the two never run at once.
        send: copies to the device.
    """

    def __init__(
        self,
        draft: RankDraft,
        config: ModelConfig,
        contract: Contract,
        *,
        turns: Turns,
        room: Room,
        graphs: Graphs,
        send: Send,
    ) -> None:
        assert config.dspark is not None
        self._draft, self._config, self._contract = draft, config, contract
        self._spark, self._room, self._graphs, self._send = config.dspark, room, graphs, send
        self._device, width = draft.embed.device, config.hidden_size
        size = self._spark.block_size
        self._block = Step(
            config=config,
            contract=contract,
            shapes=draft.shapes,
            inputs=BlockInputs(config, size, turns),
            boundary=Boundary.empty(size, width, self._device),
            spread=ExpertRows.empty(size, width, self._device),
            room=room,
        )
        self._context = ContextInputs(config, turns)
        self._main = _MainNorm(draft.main_norm, self._device)
        self._walk = DraftWalk(
            draft,
            config,
            base=self._base,
            trusted=self._trusted,
            tokens=self._block.inputs.tokens,
            positions=self._block.inputs.positions,
            room=room,
            graphs=graphs,
            send=send,
        )

    @property
    def block_size(self) -> int:
        """Drafts of one call."""
        return self._spark.block_size

    def tap(self, stream: Tensor, layer: int) -> None:
        """Launch what keeps the streams behind `layer`, [T, HC, D], for `keep_taps`, if it is a tapped one."""
        tap(self._room, self._config, stream, layer)

    def keep_taps(self, caches: Caches, slots: Tensor) -> None:
        """Launch what writes the taps of T rows at `slots`, provisional as the rows themselves."""
        assert caches.draft is not None
        long = self._room.tensor("tap slots", len(slots), dtype=torch.int64).copy_(slots)
        caches.draft.taps.index_copy_(0, long, self._taps(len(slots)))

    def write_context(self, caches: Caches, first: int, stop: int) -> None:
        """Make the context rows of positions `first` … stop - 1 of their taps, and wait for nothing."""
        for at in range(first, stop, BLOCK_ROWS):
            self._send(self._context.given, [stop], at)
            self._graphs.run(caches.graphs, "context", partial(self._launch_context, caches.draft))

    def draft(self, caches: Caches, pos: int, pending: int, choose: ChooseDraft) -> Proposal:
        """Draft a block behind `pending`, which stands at `pos`; the context rows before it are there.

        Raises:
            DrafterFault: a row or a confidence is not finite.
        """
        self._run_block(caches, pos, pending)
        return self._walk.choose(pos, pending, choose)

    def begin(self, caches: Caches, pos: int, pending: int, config: SamplerConfig) -> Drafting:
        """Start to draft likewise, all on the device, and wait for nothing."""
        lap = Lap(self._device)
        self._run_block(caches, pos, pending)
        return self._walk.begin(config, lap)

    def go_on(self, caches: Caches, first: int, config: SamplerConfig, after: Tensor) -> Drafting:
        """Start likewise where the host does not know yet behind which token.

        Args:
            first: of the context rows that are not there yet; eight at most are missing.
            after: [5] int32, as of `RankDraws.after`: where the pending token stands, and the token.
        """
        lap, context, block = Lap(self._device), self._context.given, self._block.inputs.given
        context[:1].fill_(first)
        context[TOKENS_AT:].copy_(after[:1])
        self._graphs.run(caches.graphs, "context", partial(self._launch_context, caches.draft))
        block[: len(after)].copy_(after)  # the noise behind the pending token is there
        self._graphs.run(caches.graphs, "block", partial(self._launch_block, caches.draft))
        return self._walk.begin(config, lap)

    def _run_block(self, caches: Caches, pos: int, pending: int) -> None:
        noise = [self._spark.noise_token_id] * (self.block_size - 1)
        self._send(self._block.inputs.given, [pending, *noise], pos)
        self._graphs.run(caches.graphs, "block", partial(self._launch_block, caches.draft))

    def _launch_context(self, caches: DraftCaches | None) -> None:
        assert caches is not None
        config, contract, inputs, draft = self._config, self._contract, self._context, self._draft
        inputs.refresh()
        taps = self._taps(BLOCK_ROWS)
        torch.index_select(caches.taps, 0, inputs.taps, out=taps)
        rounded = self._room.rounded("taps", BLOCK_ROWS, draft.main.k)
        round_rows(taps, act_fp8=contract.act_fp8, out=rounded, dependent=True)
        main = self._main(self._product("main", rounded, draft.main), config, contract)
        cos, sin, _ = inputs.turn
        for stage, rows in zip(draft.stages, caches.stages, strict=True):
            # the low query rows come with them: one product, and of the size that the trunk's own has
            product = self._product("down", main.rounded, stage.attention.down)
            norm_rope_write.norm_rope_rows(
                product, stage.attention.q_norm, stage.attention.kv_norm, cos, sin, inputs.slots, rows.window,
                eps=config.rms_norm_eps, act_fp8=contract.act_fp8, kv_fp8=contract.kv_fp8,
                out=self._room.rounded("latent", BLOCK_ROWS, draft.shapes.latent), dependent=True,
            )  # fmt: skip

    def _launch_block(self, caches: DraftCaches | None) -> None:
        """Run the stages: base logits of the rows, and what the collapsed streams say of the confidence."""
        assert caches is not None
        step = self._block
        step.inputs.refresh()
        rows = self._room.tensor("embedded", step.rows, self._config.hidden_size, dtype=torch.bfloat16)
        torch.index_select(self._draft.embed, 0, step.inputs.tokens, out=rows)
        step.boundary.stream.copy_(rows[:, None].expand_as(step.boundary.stream))
        y: Tensor | None = None
        for weights, own in zip(self._draft.stages, caches.stages, strict=True):
            y = run_layer(step, y, weights, own)
        step.mix(y, self._draft.hyper_head)
        parts = step.bf16("draft logits", step.boundary.x, self._draft.head)
        base = self._base.copy_(parts[0])
        for part in parts[1:]:
            base.add_(part)
        self._trust(step.boundary.stream)

    def _trust(self, stream: Tensor) -> None:
        """Launch the collapsed streams' part of the confidence: `hyper_mix` hands on no row before its norm."""
        config, room, weights = self._config, self._room, self._draft.hyper_head
        count, hc, width = stream.shape
        wide = room.tensor("draft streams", count, hc, width).copy_(stream)
        flat, squares = wide.flatten(1), room.tensor("draft squares", count, hc * width)
        mean = room.tensor("draft mean", count, 1)
        torch.mul(flat, flat, out=squares)
        torch.mean(squares, 1, keepdim=True, out=mean)
        mean.add_(config.rms_norm_eps).rsqrt_()
        shares = room.tensor("draft shares", count, hc)
        torch.mm(flat, weights.fn.mT, out=shares)
        shares.mul_(mean).mul_(weights.scale).add_(weights.base).sigmoid_().add_(config.hc_eps)
        collapsed = room.tensor("draft collapsed", count, 1, width)
        torch.bmm(shares[:, None], wide, out=collapsed)
        said = room.tensor("draft collapsed rounded", count, width, dtype=torch.bfloat16).copy_(collapsed[:, 0])
        torch.mv(collapsed[:, 0].copy_(said), self._draft.confidence[:width], out=self._trusted)

    def _product(self, name: str, rows: RoundedRows, matrix: Fp8Matrix) -> Tensor:
        out = self._room.tensor(name, fp8_rows.tuning(matrix.n, matrix.k).splits, BLOCK_ROWS, matrix.n)
        return fp8_rows.fp8_rows(rows, matrix, out=out, dependent=True)

    def _taps(self, rows: int) -> Tensor:
        return taps_of(self._room, self._config, rows)

    @property
    def _base(self) -> Tensor:
        """[B, V] float32, the logits of the block without what the token before says."""
        return self._room.tensor("draft base", self.block_size, self._config.vocab_size)

    @property
    def _trusted(self) -> Tensor:
        """[B] float32, of the confidence what the collapsed streams say."""
        return self._room.tensor("draft trusted", self.block_size)


class _MainNorm:
    """Sums a product's parts and normalises the rows, with the trunk's boundary: one stream of four that holds the row
    and three of nothing collapse into the row."""

    def __init__(self, norm: Tensor, device: torch.device) -> None:
        width = norm.shape[0]
        self._room = Boundary.empty(BLOCK_ROWS, width, device)
        self._streams = torch.zeros_like(self._room.stream)
        self._room.post.copy_(torch.eye(1, self._room.post.shape[1], device=device).expand_as(self._room.post))
        self._room.comb.zero_()
        hc = self._room.post.shape[1]
        self._weights = HyperWeights(
            fn=torch.zeros(hc, hc * width, device=device),
            scale=torch.zeros(hc, device=device),
            base=torch.full((hc,), _ALL, device=device),
            norm=norm,
        )

    def __call__(self, product: Tensor, config: ModelConfig, contract: Contract) -> Boundary:
        """Return the rows of [S, 8, D], normalised."""
        return hyper_mix.hyper_mix(
            product, self._streams, self._room, self._weights,
            iterations=config.hc_sinkhorn_iters, hc_eps=0.0, norm_eps=config.rms_norm_eps, act_fp8=contract.act_fp8,
            spread=None, out=self._room, dependent=True,
        )  # fmt: skip
