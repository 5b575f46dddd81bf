"""The DSpark drafter on whole sequences, trainable (dspark.md sections 1, 2).

Beside the axes of `layers`: M blocks of drafts, each B slots wide. Slot i of a block predicts the token behind its own
position; slot 0 holds the pending token, the others a noise id. Parameter names are the official tensor names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dsv4nb.checkpoint.config import DSPARK_STAGES, ModelConfig
from dsv4nb.contract import FP32_PLAIN, Contract
from dsv4nb.reference.layers import Attention, Balance, Collapse, Expand, HyperParts, Matrix, Mode, MoE, RMSNorm
from dsv4nb.reference.network import Block, Embedding, Network, Official, joined
from dsv4nb.reference.rotary import frequencies


class BlockAttention(Attention):
    """Attention of a block of drafts: every slot sees the same rows of the context and the whole block."""

    def context(self, main: Tensor) -> Tensor:
        """Make the rows of committed positions 0 … T - 1: [B, T, D] -> [B, T, hd]."""
        positions = torch.arange(main.shape[1], device=main.device)
        return self._rows(main, positions, frequencies(self.config, compressed=False, device=main.device))

    def over(self, x: Tensor, positions: Tensor, window: Tensor, exists: Tensor) -> Tensor:
        """Attend from the slots: [M, B, D] -> [M, B, D].

        Args:
            positions: [M, B] of the slots.
            window: [M, W, hd] rows of the context; exists: [M, W] bool, which of them there are.
        """
        freq = frequencies(self.config, compressed=False, device=x.device)
        query, own = self._query(self.q_norm(self.wq_a(x)), positions, freq), self._rows(x, positions, freq)
        rows = torch.cat([window, own], 1)
        logits = torch.einsum("mqhd,mkd->mhqk", query, rows) * self.config.head_dim**-0.5
        seen = torch.cat([exists, exists.new_ones(own.shape[:2])], 1)
        logits = logits.masked_fill(~seen[:, None, None], -math.inf)
        top = logits.detach().amax(-1, keepdim=True)
        weight = (logits - top).exp()
        total = weight.sum(-1, keepdim=True) + (self.attn_sink[:, None, None] - top).exp()
        out = torch.einsum("mhqk,mkd->mqhd", self.mode.hand_over(weight), rows)
        return self._output(self.mode.hand_over(out / total.transpose(1, 2)), positions, freq)


class Stage(Block):
    """One block of the drafter."""

    attn: BlockAttention

    def __init__(self, config: ModelConfig, stage: int, mode: Mode, parts: HyperParts) -> None:
        attn = BlockAttention(config, 0, mode, f"mtp.{stage}.attn.")
        super().__init__(config, attn, MoE(config, False, mode, f"mtp.{stage}.ffn."), mode, parts)

    def draft(self, stream: Tensor, ids: Tensor, positions: Tensor, window: Tensor, exists: Tensor) -> Tensor:
        """[M, B, HC, D] -> [M, B, HC, D]; the other arguments are those of `BlockAttention.over`, and `ids` [M, B]."""
        stream = self._sublayer(stream, "attn", lambda x: self.attn.over(self.attn_norm(x), positions, window, exists))
        return self._sublayer(stream, "ffn", lambda x: self.ffn(self.ffn_norm(x), ids))


class FirstStage(Stage):
    """The stage that also holds what reads the taps."""

    def __init__(self, config: ModelConfig, mode: Mode, parts: HyperParts) -> None:
        super().__init__(config, 0, mode, parts)
        assert config.dspark is not None
        hidden = config.hidden_size
        self.main_proj = Matrix(hidden, len(config.dspark.target_layer_ids) * hidden, "fp8", mode)
        self.main_norm = RMSNorm(hidden, config.rms_norm_eps, mode)


class MarkovHead(nn.Module):
    """A bias on the logits of a slot that depends on the token before it alone, of rank r."""

    def __init__(self, config: ModelConfig, rank: int, mode: Mode) -> None:
        super().__init__()
        self.markov_w1 = Embedding(config.vocab_size, rank, mode)
        self.markov_w2 = Matrix(config.vocab_size, rank, "bf16", mode)


class ConfidenceHead(nn.Module):
    """One logit per slot from its hidden value and the token before it: does the draft survive?"""

    def __init__(self, config: ModelConfig, rank: int, mode: Mode) -> None:
        super().__init__()
        self.proj = Matrix(1, config.hidden_size + rank, "bf16", mode)


class LastStage(Stage):
    """The stage that also holds the heads."""

    def __init__(self, config: ModelConfig, mode: Mode, parts: HyperParts) -> None:
        super().__init__(config, DSPARK_STAGES - 1, mode, parts)
        assert config.dspark is not None
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, mode)
        self.hc_head_fn = nn.Parameter(torch.empty(config.hc_mult, config.hc_mult * config.hidden_size))
        self.hc_head_base = nn.Parameter(torch.zeros(config.hc_mult))
        self.hc_head_scale = nn.Parameter(torch.ones(1))
        self.markov_head = MarkovHead(config, config.dspark.markov_rank, mode)
        self.confidence_head = ConfidenceHead(config, config.dspark.markov_rank, mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """What the drafter says of M blocks.

    Attributes:
        previous: [M, B] the token before each prediction: the pending one, then true or drafted tokens.
        base: [M, B, V] logits of the parallel part.
        logits: [M, B, V] with the bias of the token before.
        confidence: [M, B] logits.
    """

    previous: Tensor
    base: Tensor
    logits: Tensor
    confidence: Tensor


class DrafterNetwork(Official):
    """The stages `mtp.*`. Embedding and output head are the trunk's: used here, and no parameters of this module."""

    def __init__(self, trunk: Network, contract: Contract = FP32_PLAIN) -> None:
        super().__init__()
        config = trunk.config
        assert config.dspark is not None, "a DSpark drafter needs the four keys"
        self.config, self.dspark, self.mode = config, config.dspark, Mode(contract)
        self.parts = HyperParts(Balance(config), Collapse(), Expand())
        first, last = FirstStage(config, self.mode, self.parts), LastStage(config, self.mode, self.parts)
        middle = (Stage(config, stage, self.mode, self.parts) for stage in range(1, DSPARK_STAGES - 1))
        self.mtp = nn.ModuleList([first, *middle, last])
        # in tuples: what is assigned plainly becomes a submodule, under a second name or though it is the trunk's
        self._ends, self._borrowed = (first, last), (trunk.embed, trunk.head)

    @property
    def last(self) -> LastStage:
        """The stage with the heads."""
        return self._ends[1]

    @property
    def stages(self) -> list[Stage]:
        """The blocks, typed."""
        return [stage for stage in self.mtp if isinstance(stage, Stage)]

    def forward(self, ids: Tensor, taps: Tensor, row: Tensor, position: Tensor) -> Drafts:
        """Draft M blocks, each slot told the true token before it.

        Args:
            ids: [B, T]; taps: [B, T, n D] of `Network.tapped`.
            row, position: [M], sequence and position of each pending token.
        """
        hidden = self.hidden(self.context(taps), row, position, ids[row, position])
        behind = position[:, None] + torch.arange(self.dspark.block_size, device=ids.device)
        previous = ids[row[:, None], behind.clamp(max=ids.shape[1] - 1)]
        memory = self.last.markov_head.markov_w1(previous)
        base = self.base(hidden)
        return Drafts(
            previous=previous,
            base=base,
            logits=base + self._bias(memory),
            confidence=self._confidence(hidden, memory),
        )

    def context(self, taps: Tensor) -> list[Tensor]:
        """Make the rows that the slots see of committed positions: [B, T, n D] -> per stage [B, T, hd]."""
        first = self._ends[0]
        main = first.main_norm(first.main_proj(taps))
        return [stage.attn.context(main) for stage in self.stages]

    def hidden(self, context: list[Tensor], row: Tensor, position: Tensor, pending: Tensor) -> Tensor:
        """Run the stages on M blocks and join the streams: [M, B, D], not normalised.

        Args:
            context: of `context`, [B, T, hd] each; only positions before `position` are looked at.
            row, position, pending: [M], sequence, position and id of the pending tokens.
        """
        window, width, length = self.config.sliding_window, self.dspark.block_size, context[0].shape[1]
        places = position[:, None] + torch.arange(-window, 0, device=position.device)
        exists = places >= 0
        flat = (row[:, None] * length + places.clamp(min=0)).flatten()
        positions = position[:, None] + torch.arange(width, device=position.device)
        ids = torch.full_like(positions, self.dspark.noise_token_id)
        ids[:, 0] = pending
        stream = self._borrowed[0](ids)[:, :, None].expand(-1, -1, self.config.hc_mult, -1)
        for stage, rows in zip(self.stages, context, strict=True):
            # selecting by a flat index adds up gradients without sorting the index
            seen = rows.flatten(0, 1).index_select(0, flat).view(*places.shape, -1)
            stream = stage.draft(stream, ids, positions, seen, exists)
        last = self.last
        return self.mode.hand_over(joined(stream, last.hc_head_fn, last.hc_head_scale, last.hc_head_base, self.config))

    def base(self, hidden: Tensor) -> Tensor:
        """Project to the vocabulary: [M, B, D] -> [M, B, V]."""
        logits: Tensor = self._borrowed[1](self.last.norm(hidden), keep_float32=True)
        return logits

    def walk(self, hidden: Tensor, pending: Tensor) -> Drafts:
        """Draft greedily, each slot told the draft before it: `logits.argmax(-1)` are the drafts.

        Args:
            hidden: [M, B, D] of `hidden`; pending: [M].
        """
        base, head = self.base(hidden), self.last.markov_head
        previous, logits, confidence = [pending], [], []
        for slot in range(self.dspark.block_size):
            memory = head.markov_w1(previous[-1])
            logits.append(base[:, slot] + self._bias(memory))
            confidence.append(self._confidence(hidden[:, slot], memory))
            previous.append(logits[-1].argmax(-1))
        return Drafts(
            previous=torch.stack(previous[:-1], 1),
            base=base,
            logits=torch.stack(logits, 1),
            confidence=torch.stack(confidence, 1),
        )

    def draft(self, taps: Tensor, token: int, position: int) -> Drafts:
        """Draft greedily behind one pending token; M is 1.

        Args:
            taps: [T, n D] of positions 0 … T - 1, T >= `position`.
            token: the pending id; it sits at `position`.
        """
        row, place, pending = (torch.tensor([n], device=taps.device) for n in (0, position, token))
        return self.walk(self.hidden(self.context(taps[None]), row, place, pending), pending)

    def _bias(self, memory: Tensor) -> Tensor:
        bias: Tensor = self.last.markov_head.markov_w2(memory, keep_float32=True)
        return bias

    def _confidence(self, hidden: Tensor, memory: Tensor) -> Tensor:
        logit: Tensor = self.last.confidence_head.proj(torch.cat([hidden, memory], -1), keep_float32=True)
        return logit.squeeze(-1)
