"""The parts of one layer, whole sequences at a time, trainable (model.md section 3).

Axes: B sequences, T positions, D hidden, HC streams, H heads, hd head width, C compressed entries,
E experts, K chosen, I inner width. Tensors stay float32; where the contract hands over bfloat16 they are rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import Contract
from dsv4nb.reference.rotary import frequencies, rotate
from dsv4nb.reference.rounding import bf16, fp4_blocks, fp8_blocks, fp8_tiles, hadamard


@dataclass
class Mode:
    """How to run; shared by all parts of one network and changed only between forwards.

    Attributes:
        contract: roundings of activations and caches.
        round_weights: pass trainable matrices through their export format (training with rounding in the loop).
        select_entries: indexer picks apply; False attends to every visible entry, as at the start of training.
        forced_keep: per attention name, the [B, T, C] picks to use instead of the indexer's own (golden comparison).
        trace: filled with named intermediate values when not None.
        index_losses: filled with the indexer's KL losses when not None.
        counted: [B, T] bool, the rows that count for `MoE.load`; all when None.
    """

    contract: Contract
    round_weights: bool = False
    select_entries: bool = True
    forced_keep: dict[str, Tensor] = field(default_factory=dict)
    trace: dict[str, Tensor] | None = None
    index_losses: list[Tensor] | None = None
    counted: Tensor | None = None

    def hand_over(self, x: Tensor) -> Tensor:
        """Round a value that one operation passes to the next."""
        return bf16(x) if self.contract.activations == "bfloat16" else x


class Matrix(nn.Module):
    """y = x Wᵀ in one of the checkpoint's weight formats: "fp8", "bf16" or "f32"."""

    def __init__(self, out_features: int, in_features: int, kind: str, mode: Mode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.kind, self.mode = kind, mode

    def effective(self) -> Tensor:
        """Return the matrix as the export will hold it."""
        if not self.mode.round_weights or self.kind == "f32":
            return self.weight
        return fp8_tiles(self.weight) if self.kind == "fp8" else bf16(self.weight)

    def forward(self, x: Tensor, *, quantize: bool = True, keep_float32: bool = False) -> Tensor:
        """Multiply; `keep_float32` leaves out the rounding of the result."""
        if quantize and self.kind == "fp8" and self.mode.contract.act_fp8:
            x = fp8_blocks(x, 128)
        y = x @ self.effective().mT
        return y if keep_float32 else self.mode.hand_over(y)


class RMSNorm(nn.Module):
    """w · x / rms(x), float32 inside."""

    def __init__(self, width: int, eps: float, mode: Mode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.mode = eps, mode

    def forward(self, x: Tensor) -> Tensor:
        weight = bf16(self.weight) if self.mode.round_weights else self.weight
        return self.mode.hand_over(weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)))


class Balance(nn.Module):
    """The 2 HC + HC² mixes of a sublayer → its mixing weights (model.md 3.1).

    Holds no parameters; one instance serves all layers.

    Attributes:
        differentiated: how many of the last Sinkhorn iterations pass a gradient, all when None. What the earlier
            ones do is a scaling of rows and columns that the later ones undo, so training needs only a few.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.hc, self.eps, self.iterations = config.hc_mult, config.hc_eps, config.hc_sinkhorn_iters
        self.differentiated: int | None = None

    def forward(self, mix: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return pre [..., HC], post [..., HC] and comb [..., HC, HC] (from stream j to stream k).

        Args:
            mix: [..., 2 HC + HC²]; scale: [3]; base: [2 HC + HC²].
        """
        hc, eps = self.hc, self.eps
        pre = torch.sigmoid(mix[..., :hc] * scale[0] + base[:hc]) + eps
        post = 2 * torch.sigmoid(mix[..., hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
        comb = (mix[..., 2 * hc :] * scale[2] + base[2 * hc :]).unflatten(-1, (hc, hc)).softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        left = self.iterations - 1
        if self.differentiated is not None and self.differentiated < left:
            start = comb.detach()
            with torch.no_grad():
                scaled = self._iterate(start, left - self.differentiated)
            comb, left = comb * (scaled / start), self.differentiated
        return pre, post, self._iterate(comb, left)

    def _iterate(self, comb: Tensor, times: int) -> Tensor:
        for _ in range(times):
            comb = comb / (comb.sum(-1, keepdim=True) + self.eps)
            comb = comb / (comb.sum(-2, keepdim=True) + self.eps)
        return comb


class Collapse(nn.Module):
    """Σ_j pre_j · s_j: [..., HC, D] and [..., HC] -> [..., D]."""

    def forward(self, stream: Tensor, pre: Tensor) -> Tensor:
        return (pre[..., None] * stream).sum(-2)


class Expand(nn.Module):
    """post_k · y + Σ_j comb_jk · s_j: the streams after a sublayer."""

    def forward(self, y: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        out = post[..., None] * y[..., None, :]
        for j in range(stream.shape[-2]):  # a 4x4 batched product would cost more than the layer
            out = out + comb[..., j, :, None] * stream[..., j : j + 1, :]
        return out


@dataclass(frozen=True)
class HyperParts:
    """The three steps around a sublayer, shared by all layers."""

    balance: Balance
    collapse: Collapse
    expand: Expand


class Compressor(nn.Module):
    """Pools source rows into entries: 128 rows each, or 4 + the 4 before them (model.md 3.4)."""

    def __init__(self, config: ModelConfig, ratio: int, width: int, mode: Mode) -> None:
        super().__init__()
        columns = 2 * width if ratio == 4 else width
        self.wkv = Matrix(columns, config.hidden_size, "bf16", mode)
        self.wgate = Matrix(columns, config.hidden_size, "bf16", mode)
        self.ape = nn.Parameter(torch.zeros(ratio, columns))
        self.norm = RMSNorm(width, config.rms_norm_eps, mode)
        self.ratio, self.width, self.mode = ratio, width, mode

    def forward(self, x: Tensor, freq: Tensor) -> Tensor:
        """[B, T, D] -> [B, T // ratio, width], normalised and rotated, not yet rounded to a cache format."""
        ratio, width = self.ratio, self.width
        count = x.shape[1] // ratio
        if count == 0:
            return x.new_zeros(x.shape[0], 0, width)
        x = x[:, : count * ratio]
        value = self.wkv(x, keep_float32=True).unflatten(1, (count, ratio))
        score = self.wgate(x, keep_float32=True).unflatten(1, (count, ratio)) + self.ape
        if ratio == 4:
            before_value = F.pad(value[:, :-1, :, :width], (0, 0, 0, 0, 1, 0))
            before_score = F.pad(score[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=-math.inf)
            value = torch.cat([before_value, value[..., width:]], 2)
            score = torch.cat([before_score, score[..., width:]], 2)
        entry = self.norm(self.mode.hand_over((value * score.softmax(2)).sum(2)))
        first = torch.arange(count, device=x.device) * ratio
        return self.mode.hand_over(rotate(entry, first, freq))


class Indexer(nn.Module):
    """Scores compressed entries for each query; the best are attended to (model.md 3.5)."""

    def __init__(self, config: ModelConfig, mode: Mode) -> None:
        super().__init__()
        self.heads, self.width, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.wq_b = Matrix(self.heads * self.width, config.q_lora_rank, "fp8", mode)
        self.weights_proj = Matrix(self.heads, config.hidden_size, "bf16", mode)
        self.compressor = Compressor(config, 4, self.width, mode)
        self.mode = mode

    def forward(self, x: Tensor, latent: Tensor, freq: Tensor, positions: Tensor) -> Tensor:
        """Return scores [B, T, C], not masked.

        Args:
            x: [B, T, D] input of the attention sublayer.
            latent: [B, T, q_lora_rank] normalised low-rank query.
        """
        hand_over = self.mode.hand_over
        query = self.wq_b(latent).unflatten(-1, (self.heads, self.width))
        query = hand_over(rotate(query, positions, freq))
        key = self.compressor(x, freq)
        if self.mode.contract.index_fp4:
            query = fp4_blocks(hand_over(hadamard(query)))
            key = fp4_blocks(hand_over(hadamard(key)))
        weight = hand_over(self.weights_proj(x) * (self.width**-0.5 * self.heads**-0.5))
        score = hand_over(torch.einsum("bthd,bcd->bthc", query, key)).relu()
        return hand_over(hand_over(score * weight[..., None]).sum(2))


def best_entries(score: Tensor, visible: Tensor, topk: int) -> Tensor:
    """Pick the `topk` best visible entries of each row, ties to the lowest index.

    Args:
        score: [B, T, C]; visible: [T, C] bool.

    Returns:
        [B, T, C] bool.
    """
    masked = score.masked_fill(~visible, -math.inf)
    order = masked.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    keep = torch.zeros_like(masked, dtype=torch.bool).scatter(-1, order, True)
    return keep & visible


class Attention(nn.Module):
    """Latent attention over a sliding window and compressed entries (model.md 3.3)."""

    def __init__(self, config: ModelConfig, ratio: int, mode: Mode, name: str) -> None:
        super().__init__()
        self.config, self.ratio, self.mode, self.name = config, ratio, mode, name
        hidden, heads, width, rank = config.hidden_size, config.num_attention_heads, config.head_dim, config.q_lora_rank
        self.wq_a = Matrix(rank, hidden, "fp8", mode)
        self.q_norm = RMSNorm(rank, config.rms_norm_eps, mode)
        self.wq_b = Matrix(heads * width, rank, "fp8", mode)
        self.wkv = Matrix(width, hidden, "fp8", mode)
        self.kv_norm = RMSNorm(width, config.rms_norm_eps, mode)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.wo_a = Matrix(config.o_groups * config.o_lora_rank, heads * width // config.o_groups, "fp8", mode)
        self.wo_b = Matrix(hidden, config.o_groups * config.o_lora_rank, "fp8", mode)
        self.compressor = Compressor(config, ratio, width, mode) if ratio else None
        self.indexer = Indexer(config, mode) if ratio == 4 else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        config = self.config
        positions = torch.arange(x.shape[1], device=x.device)
        freq = frequencies(config, compressed=self.ratio > 0, device=x.device)
        latent = self.q_norm(self.wq_a(x))
        query, rows = self._query(latent, positions, freq), self._rows(x, positions, freq)
        if self.compressor is None:
            out = self._attend(query, rows, None, None)
        else:
            entries = self._cached(self.compressor(x, freq))
            visible = torch.arange(entries.shape[1], device=x.device) < ((positions + 1) // self.ratio)[:, None]
            keep, score = visible.expand(x.shape[0], -1, -1), None
            if self.indexer is not None:
                # top-k passes no gradient: the indexer learns from its own loss and must not move the trunk
                score = self.indexer(x.detach(), latent.detach(), freq, positions)
                if self.mode.select_entries:
                    keep = self.mode.forced_keep.get(
                        self.name, best_entries(score.detach(), visible, config.index_topk)
                    )
            self._record(entries, score, keep)
            out = self._attend(query, rows, entries, keep, score)
        return self._output(out, positions, freq)

    def _query(self, latent: Tensor, positions: Tensor, freq: Tensor) -> Tensor:
        """[B, T, q_lora_rank] -> rotated heads [B, T, H, hd]."""
        query = self.wq_b(latent).unflatten(-1, (self.config.num_attention_heads, self.config.head_dim))
        return self.mode.hand_over(rotate(self._normalize_heads(query), positions, freq))

    def _rows(self, x: Tensor, positions: Tensor, freq: Tensor) -> Tensor:
        """[B, T, D] -> key/value rows as the cache holds them, [B, T, hd]."""
        return self._cached(self.mode.hand_over(rotate(self.kv_norm(self.wkv(x)), positions, freq)))

    def _output(self, out: Tensor, positions: Tensor, freq: Tensor) -> Tensor:
        """Rotate back and project: [B, T, H, hd] -> [B, T, D]."""
        config, hand_over = self.config, self.mode.hand_over
        out = hand_over(rotate(out, positions, freq, inverse=True))
        grouped = out.flatten(2).unflatten(-1, (config.o_groups, -1))
        down = self.wo_a.effective().unflatten(0, (config.o_groups, config.o_lora_rank))
        projected: Tensor = self.wo_b(hand_over(torch.einsum("btgd,grd->btgr", grouped, down)).flatten(2))
        return projected

    def _normalize_heads(self, query: Tensor) -> Tensor:
        """Divide each head by its rms, without a weight; in bfloat16 every step rounds."""
        hand_over = self.mode.hand_over
        mean = hand_over(hand_over(query.square()).mean(-1, keepdim=True))
        factor = hand_over(torch.rsqrt(hand_over(mean + self.config.rms_norm_eps)))
        return hand_over(query * factor)

    def _cached(self, rows: Tensor) -> Tensor:
        """Round key/value rows as the cache does: e4m3 outside the rotary tail."""
        if not self.mode.contract.kv_fp8:
            return rows
        plain = self.config.head_dim - self.config.qk_rope_head_dim
        return torch.cat([fp8_blocks(rows[..., :plain], 64), rows[..., plain:]], -1)

    def _attend(
        self, query: Tensor, rows: Tensor, entries: Tensor | None, keep: Tensor | None, score: Tensor | None = None
    ) -> Tensor:
        """Softmax over window and kept entries with the sink in the denominator: [B, T, H, hd].

        The window is laid out in blocks: a block of W queries sees its own and the previous block of rows.
        """
        window, length, scale = self.config.sliding_window, query.shape[1], self.config.head_dim**-0.5
        blocks = -(-length // window)
        padding = blocks * window - length
        query_b = F.pad(query, (0, 0, 0, 0, 0, padding)).unflatten(1, (blocks, window))
        rows_b = F.pad(rows, (0, 0, 0, padding)).unflatten(1, (blocks, window))
        rows_b = torch.cat([F.pad(rows_b[:, :-1], (0, 0, 0, 0, 1, 0)), rows_b], 2)  # [B, blocks, 2W, hd]
        logits = torch.einsum("bnqhd,bnkd->bhnqk", query_b, rows_b) * scale
        ago = (
            torch.arange(window, device=query.device)[:, None] + window - torch.arange(2 * window, device=query.device)
        )
        near = (ago >= 0) & (ago < window)
        exists = torch.arange(2 * window, device=query.device) >= window  # the first block has none before it
        near = near & (exists | (torch.arange(blocks, device=query.device) > 0)[:, None])[:, None]
        logits = logits.masked_fill(~near, -math.inf).flatten(2, 3)[:, :, :length]
        if entries is not None and keep is not None:
            far = torch.einsum("bthd,bcd->bhtc", query, entries) * scale
            logits = torch.cat([logits, far.masked_fill(~keep[:, None], -math.inf)], -1)
        top = logits.detach().amax(-1, keepdim=True)
        weight = (logits - top).exp()
        total = weight.sum(-1, keepdim=True) + (self.attn_sink[:, None, None] - top).exp()
        weight = self.mode.hand_over(weight)
        near_weight = F.pad(weight[..., : 2 * window], (0, 0, 0, padding)).unflatten(2, (blocks, window))
        out = torch.einsum("bhnqk,bnkd->bnqhd", near_weight, rows_b).flatten(1, 2)[:, :length]
        if entries is not None:
            far_weight = weight[..., 2 * window :]
            out = out + torch.einsum("bhtc,bcd->bthd", far_weight, entries)
            if score is not None and keep is not None and self.mode.index_losses is not None:
                self.mode.index_losses.append(index_loss(score, far_weight / total, keep))
        return self.mode.hand_over(out / total.transpose(1, 2))

    def _record(self, entries: Tensor, score: Tensor | None, keep: Tensor) -> None:
        if self.mode.trace is not None:
            self.mode.trace[f"{self.name}compressed"] = entries
            if score is not None:
                self.mode.trace[f"{self.name}index_score"] = score
                self.mode.trace[f"{self.name}index_keep"] = keep


def index_loss(score: Tensor, weight: Tensor, keep: Tensor) -> Tensor:
    """KL from the attention over entries, summed over heads and normalised, to the indexer's softmax.

    Rows weigh by the attention mass they give to entries, so positions that look nowhere teach nothing.

    Args:
        score: [B, T, C] with gradient; weight: [B, H, T, C] attention; keep: [B, T, C] entries in play.
    """
    mass = weight.detach().sum(1)
    total = mass.sum(-1, keepdim=True)
    target = mass / total.clamp_min(1e-9)
    log_share = score.masked_fill(~keep, -1e9).log_softmax(-1).masked_fill(~keep, 0.0)
    kl = (target * (target.clamp_min(1e-9).log() - log_share)).sum(-1)
    several = keep.sum(-1) > 1
    share = (total.squeeze(-1) / weight.shape[1]) * several
    return (kl * share).sum() / share.sum().clamp_min(1.0)


class Gate(nn.Module):
    """The router: sqrt(softplus) scores; chosen by bias-shifted score or by a token-id table (model.md 3.6)."""

    tid2eid: Tensor

    def __init__(self, config: ModelConfig, hashed: bool, mode: Mode) -> None:
        super().__init__()
        self.config, self.mode = config, mode
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.bias: nn.Parameter | None = None
        if hashed:
            self.register_buffer(
                "tid2eid", torch.zeros(config.vocab_size, config.num_experts_per_tok, dtype=torch.int64)
            )
        else:
            self.bias = nn.Parameter(torch.zeros(config.n_routed_experts), requires_grad=False)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return chosen experts [B, T, K] and their weights [B, T, K]."""
        weight = bf16(self.weight) if self.mode.round_weights else self.weight
        score = F.softplus(x @ weight.mT).sqrt()
        if self.bias is None:
            chosen = self.tid2eid[ids]
        else:
            chosen = (score.detach() + self.bias).topk(self.config.num_experts_per_tok, -1).indices
        share = score.gather(-1, chosen)
        return chosen, share / share.sum(-1, keepdim=True) * self.config.routed_scaling_factor


class Experts(nn.Module):
    """All routed experts as stacks; every expert runs on every row and unchosen ones weigh zero."""

    def __init__(self, config: ModelConfig, mode: Mode) -> None:
        super().__init__()
        experts, inner, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.w1 = nn.Parameter(torch.empty(experts, inner, hidden))
        self.w3 = nn.Parameter(torch.empty(experts, inner, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, inner))
        self.config, self.mode = config, mode
        self.kind = "fp4" if config.expert_dtype == "fp4" else "bf16"

    def _effective(self, weight: Tensor) -> Tensor:
        if not self.mode.round_weights:
            return weight
        return fp4_blocks(weight) if self.kind == "fp4" else bf16(weight)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Sum the experts' outputs.

        Args:
            x: [N, D], already rounded for FP4 matrices; weight: [N, E], zero where not chosen.
        """
        hand_over = self.mode.hand_over
        gate = hand_over(torch.einsum("nd,eid->eni", x, self._effective(self.w1)))
        up = hand_over(torch.einsum("nd,eid->eni", x, self._effective(self.w3)))
        inner = hand_over(clamped_swiglu(gate, up, self.config.swiglu_limit) * weight.mT[..., None])
        if self.mode.contract.act_fp8:
            inner = fp8_blocks(inner, 128)
        if self.mode.contract.activations == "float32":
            return torch.einsum("eni,edi->nd", inner, self._effective(self.w2))
        return hand_over(torch.einsum("eni,edi->end", inner, self._effective(self.w2))).sum(0)


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) · clamp(up, ±limit): the clamps act before the activation, the gate has no lower one."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class SharedExpert(nn.Module):
    """The expert every row passes: same clamp, no weight."""

    def __init__(self, config: ModelConfig, mode: Mode) -> None:
        super().__init__()
        inner, hidden = config.n_shared_experts * config.moe_intermediate_size, config.hidden_size
        self.w1 = Matrix(inner, hidden, "fp8", mode)
        self.w3 = Matrix(inner, hidden, "fp8", mode)
        self.w2 = Matrix(hidden, inner, "fp8", mode)
        self.limit, self.mode = config.swiglu_limit, mode

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(self.mode.hand_over(clamped_swiglu(self.w1(x), self.w3(x), self.limit)))
        return out


class MoE(nn.Module):
    """Router, routed experts and shared expert."""

    def __init__(self, config: ModelConfig, hashed: bool, mode: Mode, name: str) -> None:
        super().__init__()
        self.gate = Gate(config, hashed, mode)
        self.experts = Experts(config, mode)
        self.shared_experts = SharedExpert(config, mode)
        self.config, self.mode, self.name = config, mode, name
        self.load: Tensor | None = None  # rows per expert of the last forward, for balancing

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        chosen, share = self.gate(x, ids)
        weight = torch.zeros(*chosen.shape[:-1], self.config.n_routed_experts, device=x.device)
        weight = weight.scatter_add(-1, chosen, share).flatten(0, 1)
        used = weight.detach() > 0
        self.load = (used if self.mode.counted is None else used & self.mode.counted.flatten()[:, None]).sum(0)
        if self.mode.trace is not None:
            self.mode.trace[f"{self.name}route_idx"] = chosen.sort(-1).values
            self.mode.trace[f"{self.name}route_wt"] = share
        rounded = fp8_blocks(x, 128) if self.mode.contract.act_fp8 else x
        routed = self.experts(rounded.flatten(0, 1), weight).view_as(x)
        return self.mode.hand_over(routed + self.shared_experts(x))
