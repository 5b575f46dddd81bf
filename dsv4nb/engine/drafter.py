"""The DSpark drafter: a block of noise behind the pending token, read at once, then a walk along it (dspark.md 1, 2).

Only drafts depend on what is computed here, never the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import Contract
from dsv4nb.engine import ops
from dsv4nb.engine.attention import Attention, Keys
from dsv4nb.engine.batch import Rotary
from dsv4nb.engine.experts import mix_experts
from dsv4nb.engine.hyper import Hyper
from dsv4nb.engine.ops import TILE
from dsv4nb.engine.protocol import ChooseDraft, Proposal
from dsv4nb.engine.rings import DraftRings
from dsv4nb.engine.rope import Turn
from dsv4nb.errors import DrafterFault
from dsv4nb.weights.store import AttentionWeights, DraftWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The pending token and the noise behind it, at the beginning of whole tiles; see `Places`."""

    places: int
    live: slice
    tokens: Tensor


class Drafter:
    """The drafter with its weights.

    Args:
        embed, head: the trunk's.
    """

    def __init__(
        self, weights: DraftWeights, embed: Tensor, head: Tensor, config: ModelConfig, contract: Contract
    ) -> None:
        assert config.dspark is not None
        self._weights, self._embed, self._head = weights, embed, head
        self._config, self._spark, self._contract = config, config.dspark, contract
        self._hyper, self._attention, self._rotary = Hyper(config), Attention(config, contract), Rotary(config)

    @property
    def block_size(self) -> int:
        return self._spark.block_size

    def make_rows(self, taps: Tensor, first: int) -> Tensor:
        """Make context rows: [n, K·D] of the positions from `first` on -> [S, n, hd].

        Rows stand in tiles by absolute position, as in the trunk, so that how many are made at once changes no bit.
        """
        weights, eps, act_fp8 = self._weights, self._config.rms_norm_eps, self._contract.act_fp8
        lead, count = first % TILE, taps.shape[0]
        places = -(-(lead + count) // TILE) * TILE
        placed = taps.new_zeros(places, taps.shape[1])
        placed[lead : lead + count] = taps
        main = ops.fp8_rows(placed, weights.main.weight, act_fp8=act_fp8 and weights.main.is_fp8)
        main = ops.rms_norm(main, weights.main_norm, eps)
        turn = self._rotary.table(is_compressed=False).at(first - lead, first - lead + places)
        rows = []
        for stage in weights.stages:
            down = stage.attention.down
            value = ops.fp8_rows(main, down.weight[self._config.q_lora_rank :], act_fp8=act_fp8 and down.is_fp8)
            rows.append(self._key_rows(value, turn, stage.attention))
        return torch.stack(rows)[:, lead : lead + count]

    def draft(self, rings: DraftRings, pos: int, pending: int, choose: ChooseDraft) -> Proposal:
        """Draft a block behind `pending`, which stands at `pos`; see `Engine.draft`."""
        rings.catch_up(pos)
        collapsed = self._run(rings, pos, pending)
        hidden = ops.rms_norm(collapsed, self._weights.hyper_head.norm, self._config.rms_norm_eps)
        base = ops.bf16_rows(hidden, self._head)
        return self._walk(base, collapsed, pending, choose)

    def _run(self, rings: DraftRings, pos: int, pending: int) -> Tensor:
        """Run the stages: the collapsed stream of every place, [places, D]."""
        size = self.block_size
        places = -(-size // TILE) * TILE
        tokens = torch.zeros(places, dtype=torch.int64)
        tokens[0], tokens[1:size] = pending, self._spark.noise_token_id
        block = Block(places=places, live=slice(0, size), tokens=tokens)
        turn = self._rotary.table(is_compressed=False).at(pos, pos + places)
        seen = rings.seen(pos)
        stream = self._embed[tokens][:, None].expand(-1, self._config.hc_mult, -1).contiguous()
        for stage, weights in enumerate(self._weights.stages):
            x, post, comb = self._hyper.mix(stream, weights.hyper_attention)
            y = self._attend(block, x, rings.rows[stage, seen], turn, weights.attention)
            stream = ops.hyper_expand(y, stream, post, comb)
            x, post, comb = self._hyper.mix(stream, weights.hyper_experts)
            y = mix_experts(block, x, weights.experts, self._config, self._contract)
            stream = ops.hyper_expand(y, stream, post, comb)
        return self._hyper.collapse_raw(stream, self._weights.hyper_head)

    def _attend(self, block: Block, x: Tensor, context: Tensor, turn: Turn, weights: AttentionWeights) -> Tensor:
        """Attend to the context and to the whole block, in both directions: [places, D] -> [places, D]."""
        config = self._config
        down = ops.fp8_rows(x, weights.down.weight, act_fp8=self._contract.act_fp8 and weights.down.is_fp8)
        latent = ops.rms_norm(down[:, : config.q_lora_rank], weights.q_norm, config.rms_norm_eps)
        own = self._key_rows(down[:, config.q_lora_rank :], turn, weights)[block.live]
        size = self.block_size
        splits: list[Keys] = [
            (keys.expand(size, -1, -1), torch.zeros(size, keys.shape[0], dtype=torch.bool)) for keys in (context, own)
        ]
        return self._attention.attend(block, latent, splits, turn, weights)

    def _key_rows(self, rows: Tensor, turn: Turn, weights: AttentionWeights) -> Tensor:
        eps, kv_fp8 = self._config.rms_norm_eps, self._contract.kv_fp8
        return ops.norm_rope_rows(rows, weights.kv_norm, *turn, eps=eps, kv_fp8=kv_fp8)

    def _walk(self, base: Tensor, collapsed: Tensor, pending: int, choose: ChooseDraft) -> Proposal:
        """Choose one draft after the other; each biases the row behind it."""
        weights = self._weights
        ids: list[int] = []
        rows, confidences = [], []
        token = pending
        for slot in range(self.block_size):
            near = weights.markov_in[token]
            confidence = float(weights.confidence @ torch.cat((collapsed[slot], near)))
            row = (base[slot] + weights.markov_out @ near).numpy()
            if not (abs(confidence) < float("inf") and bool(abs(row.sum()) < float("inf"))):
                raise DrafterFault(f"the drafter's row {slot} is not finite", param="drafter")
            token = choose(row, slot, ids)
            ids.append(token)
            rows.append(row)
            confidences.append(confidence)
        return Proposal(ids=tuple(ids), conf_logits=tuple(confidences), rows=tuple(rows))
