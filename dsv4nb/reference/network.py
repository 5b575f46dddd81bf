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

    def __init__(self, config: ModelConfig, attn: Attention, ffn: MoE, mode: Mode, parts: HyperParts) -> None:
        super().__init__()
        hc, hidden = config.hc_mult, config.hidden_size
        mixes = (2 + hc) * hc
        self.attn_norm = RMSNorm(hidden, config.rms_norm_eps, mode)
        self.ffn_norm = RMSNorm(hidden, config.rms_norm_eps, mode)
        self.attn, self.ffn = attn, ffn
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
    """A table with a row per token id, bf16 on disk."""

    def __init__(self, rows: int, width: int, mode: Mode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.mode = mode

    def forward(self, ids: Tensor) -> Tensor:
        rows = nn.functional.embedding(ids, self.weight)
        if self.mode.round_weights:
            rows = rows.bfloat16().float()
        return rows


def joined(stream: Tensor, fn: Tensor, scale: Tensor, base: Tensor, config: ModelConfig) -> Tensor:
    """Collapse the streams behind the last block (model.md 3.1): [..., HC, D] -> [..., D], not rounded.

    Args:
        fn: [HC, HC D]; scale: [1]; base: [HC].
    """
    flat = stream.flatten(-2)
    mix = (flat @ fn.mT) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    share = torch.sigmoid(mix * scale + base) + config.hc_eps
    return (share[..., None] * stream).sum(-2)


_STACK = re.compile(r"((?:layers|mtp)\.\d+\.ffn\.experts)\.(w[123])")


def _expert(match: re.Match[str], expert: int) -> str:
    return f"{match[1]}.{expert}.{match[2]}.weight"


class Official(nn.Module):
    """A module whose parameters have the official tensor names, the routed experts of a layer stacked."""

    config: ModelConfig

    def load_official(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill every parameter from dequantised tensors under official names; other tensors are ignored.

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


class Network(Official):
    """DeepSeek-V4 on whole sequences; `contract` chooses the roundings."""

    def __init__(self, config: ModelConfig, contract: Contract = FP32_PLAIN) -> None:
        super().__init__()
        self.config = config
        self.mode = mode = Mode(contract)
        self.parts = HyperParts(Balance(config), Collapse(), Expand())
        self.embed = Embedding(config.vocab_size, config.hidden_size, mode)
        self.layers = nn.ModuleList(self._block(n) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, mode)
        self.head = Matrix(config.vocab_size, config.hidden_size, "bf16", mode)
        self.hc_head_fn = nn.Parameter(torch.empty(config.hc_mult, config.hc_mult * config.hidden_size))
        self.hc_head_base = nn.Parameter(torch.zeros(config.hc_mult))
        self.hc_head_scale = nn.Parameter(torch.ones(1))

    def _block(self, layer: int) -> Block:
        config, mode, name = self.config, self.mode, f"layers.{layer}."
        attn = Attention(config, config.compress_ratios[layer], mode, f"{name}attn.")
        return Block(config, attn, MoE(config, config.is_hashed(layer), mode, f"{name}ffn."), mode, self.parts)

    @property
    def blocks(self) -> list[Block]:
        """The layers, typed."""
        return [block for block in self.layers if isinstance(block, Block)]

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, T, V] float32 for ids [B, T]; row t predicts position t + 1."""
        return self.logits(self.stream(ids))

    def tapped(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Run all layers and keep what a drafter reads of them (dspark.md 1.6).

        Returns:
            Residual streams [B, T, HC, D], and taps [B, T, n D]: the mean of the streams behind each of the n layers
            of `dspark_target_layer_ids`, side by side.
        """
        assert self.config.dspark is not None, "taps are of the layers that the dspark_* keys name"
        taps: dict[int, Tensor] = {}
        stream = self.stream(ids, taps)
        return stream, torch.cat([taps[layer] for layer in self.config.dspark.target_layer_ids], -1)

    def stream(self, ids: Tensor, means: dict[int, Tensor] | None = None) -> Tensor:
        """Run all layers: [B, T] -> residual streams [B, T, HC, D].

        Args:
            means: filled with the mean of the streams behind each layer, [B, T, D], when not None.
        """
        stream: Tensor = self.embed(ids)[:, :, None].expand(-1, -1, self.config.hc_mult, -1)
        for layer, block in enumerate(self.layers):
            stream = block(stream, ids)
            if means is not None:
                means[layer] = self.mode.hand_over(stream.mean(-2))
            if self.mode.trace is not None:
                self.mode.trace[f"layers.{layer}.stream"] = stream
        return stream

    def logits(self, stream: Tensor) -> Tensor:
        """Collapse, normalise and project: [B, T, HC, D] -> [B, T, V]."""
        collapsed = joined(stream, self.hc_head_fn, self.hc_head_scale, self.hc_head_base, self.config)
        out: Tensor = self.head(self.norm(self.mode.hand_over(collapsed)), keep_float32=True)
        return out
