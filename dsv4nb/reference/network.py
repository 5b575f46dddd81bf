"""The whole-sequence network: trainable, without caches, and the oracle the engine is tested against.

Parameter names are the official tensor names, except that the routed experts of a layer are three stacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.contract import FP32_PLAIN, Contract
from dsv4nb.reference.layers import Attention, Balance, Collapse, Expand, HyperParts, Matrix, Mode, MoE, RMSNorm


class Block(nn.Module):
    """One decoder layer on four residual streams."""

    def __init__(self, config: ModelConfig, layer: int, mode: Mode, parts: HyperParts) -> None:
        super().__init__()
        hc, hidden = config.hc_mult, config.hidden_size
        mixes = (2 + hc) * hc
        self.attn_norm = RMSNorm(hidden, config.rms_norm_eps, mode)
        self.ffn_norm = RMSNorm(hidden, config.rms_norm_eps, mode)
        self.attn = Attention(config, config.compress_ratios[layer], mode, f"layers.{layer}.attn.")
        self.ffn = MoE(config, config.is_hashed(layer), mode, f"layers.{layer}.ffn.")
        for part in ("attn", "ffn"):
            self.register_parameter(f"hc_{part}_fn", nn.Parameter(torch.empty(mixes, hc * hidden)))
            self.register_parameter(f"hc_{part}_base", nn.Parameter(torch.zeros(mixes)))
            self.register_parameter(f"hc_{part}_scale", nn.Parameter(torch.ones(3)))
        self.config, self.mode, self._parts = config, mode, parts

    def forward(self, stream: Tensor, ids: Tensor) -> Tensor:
        """[B, T, HC, D] -> [B, T, HC, D]; `ids` [B, T] for the hash-routed layers."""
        stream = self._sublayer(stream, "attn", lambda x: self.attn(self.attn_norm(x)))
        return self._sublayer(stream, "ffn", lambda x: self.ffn(self.ffn_norm(x), ids))

    def _sublayer(self, stream: Tensor, part: str, body) -> Tensor:  # type: ignore[no-untyped-def]
        fn, scale, base = (getattr(self, f"hc_{part}_{leaf}") for leaf in ("fn", "scale", "base"))
        flat = stream.flatten(-2)
        mix = (flat @ fn.mT) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        pre, post, comb = self._parts.balance(mix, scale, base)
        y = body(self.mode.hand_over(self._parts.collapse(stream, pre)))
        return self.mode.hand_over(self._parts.expand(y, stream, post, comb))


class Embedding(nn.Module):
    """The token table, [V, D] bf16 on disk."""

    def __init__(self, config: ModelConfig, mode: Mode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.mode = mode

    def forward(self, ids: Tensor) -> Tensor:
        rows = nn.functional.embedding(ids, self.weight)
        if self.mode.round_weights:
            rows = rows.bfloat16().float()
        return rows


class Network(nn.Module):
    """DeepSeek-V4 on whole sequences; `contract` chooses the roundings."""

    def __init__(self, config: ModelConfig, contract: Contract = FP32_PLAIN) -> None:
        super().__init__()
        self.config = config
        self.mode = mode = Mode(contract)
        self.parts = HyperParts(Balance(config), Collapse(), Expand())
        self.embed = Embedding(config, mode)
        blocks = [Block(config, n, mode, self.parts) for n in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, mode)
        self.head = Matrix(config.vocab_size, config.hidden_size, "bf16", mode)
        self.hc_head_fn = nn.Parameter(torch.empty(config.hc_mult, config.hc_mult * config.hidden_size))
        self.hc_head_base = nn.Parameter(torch.zeros(config.hc_mult))
        self.hc_head_scale = nn.Parameter(torch.ones(1))

    @property
    def blocks(self) -> list[Block]:
        """The layers, typed."""
        return [block for block in self.layers if isinstance(block, Block)]

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, T, V] float32 for ids [B, T]; row t predicts position t + 1."""
        return self.logits(self.stream(ids))

    def stream(self, ids: Tensor) -> Tensor:
        """Run all layers: [B, T] -> residual streams [B, T, HC, D]."""
        stream: Tensor = self.embed(ids)[:, :, None].expand(-1, -1, self.config.hc_mult, -1)
        for layer, block in enumerate(self.layers):
            stream = block(stream, ids)
            if self.mode.trace is not None:
                self.mode.trace[f"layers.{layer}.stream"] = stream
        return stream

    def logits(self, stream: Tensor) -> Tensor:
        """Collapse, normalise and project: [B, T, HC, D] -> [B, T, V]."""
        flat = stream.flatten(-2)
        mix = (flat @ self.hc_head_fn.mT) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        pre = torch.sigmoid(mix * self.hc_head_scale + self.hc_head_base) + self.config.hc_eps
        collapsed = self.mode.hand_over(self.parts.collapse(stream, pre))
        out: Tensor = self.head(self.norm(collapsed), keep_float32=True)
        return out

    def load_official(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill every parameter from dequantised tensors under official names; drafter tensors are ignored.

        Raises:
            KeyError: a tensor is missing.
        """
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        with torch.no_grad():
            for name, parameter in own.items():
                if match := _STACK.fullmatch(name):
                    value = torch.stack([tensors[_expert(match, e)] for e in range(self.config.n_routed_experts)])
                else:
                    value = tensors[name]
                parameter.copy_(value)

    def official(self) -> dict[str, Tensor]:
        """Return all parameters under official names, experts unstacked, detached on the CPU."""
        out: dict[str, Tensor] = {}
        for name, value in (*self.named_parameters(), *self.named_buffers()):
            value = value.detach().cpu()
            if match := _STACK.fullmatch(name):
                out |= {_expert(match, e): value[e].contiguous() for e in range(value.shape[0])}
            else:
                out[name] = value
        return out


_STACK = re.compile(r"(layers\.\d+\.ffn\.experts)\.(w[123])")


def _expert(match: re.Match[str], expert: int) -> str:
    return f"{match[1]}.{expert}.{match[2]}.weight"
