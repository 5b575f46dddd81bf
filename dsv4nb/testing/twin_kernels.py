"""The twins behind the kernels' calls: a `DeviceEngine` on the CPU, without Triton's interpreter and in its stead.

    with twin_kernels():
        engine = DeviceEngine.from_checkpoint(checkpoint, device="cpu")

What is tested so is everything but the kernels: positions, slots, lists of places, caches, the order of the calls and
what they hand on, in the kernels' own layouts. Each row is computed by itself, and rounded to bfloat16 where a kernel
rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dsv4nb.engine import rank_drafter, rank_layer
from dsv4nb.testing.twin_chunks import ChunkTwins, kv_rows, put_chunk
from dsv4nb.weights.packing import unpack_fp4, unpack_fp8
from dsv4nb_kernels import bf16_rows as bf16_kernel
from dsv4nb_kernels import fp8_rows as fp8_kernel
from dsv4nb_kernels._best import Scored
from dsv4nb_kernels._draw_rules import Settings, Stages
from dsv4nb_kernels._expert_weights import DownWeights, UpWeights, unpack_down, unpack_up
from dsv4nb_kernels._peer import Link
from dsv4nb_kernels._rounded_rows import BLOCK, RoundedRows
from dsv4nb_kernels.bf16_rows import Bf16Matrix
from dsv4nb_kernels.draw import Drawn
from dsv4nb_kernels.fp8_rows import Fp8Matrix
from dsv4nb_kernels.hyper_mix import Boundary, HyperWeights
from dsv4nb_kernels.reference import (
    compress,
    draw,
    expert_up,
    hyper_mix,
    index_rows,
    index_scores,
    markov_step,
    norm_rope_write,
    peer_join,
    route,
    sparse_attention,
    top_entries,
)
from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference._norm import rms_norm
from dsv4nb_kernels.reference._records import pack_records
from dsv4nb_kernels.reference._rotary import rotate_tail
from dsv4nb_kernels.reference._tiles import TILE

__all__ = ["twin_kernels"]

SPLIT = 32  # places of a list in one split of the attention


@contextmanager
def twin_kernels() -> Iterator[None]:
    """Let every kernel that a `DeviceEngine` launches inside be computed by its twin."""
    twins = _Twins()
    with ExitStack() as stack:
        for name in (
            *(
                "bf16_rows",
                "compress",
                "draw",
                "expert_down",
                "expert_up",
                "fp8_rows",
                "hyper_mix",
                "index_rows",
            ),
            *("index_scores", "markov_step", "route", "sparse_attention", "top_entries"),
        ):
            stack.enter_context(patch(f"dsv4nb_kernels.{name}.{name}", getattr(twins, name)))
        stack.enter_context(patch("dsv4nb_kernels._compress_both.compress_both", twins.compress_both))
        for name in ("norm_rope_rows", "norm_rope_heads"):
            stack.enter_context(patch(f"dsv4nb_kernels.norm_rope_write.{name}", getattr(twins, name)))
        for target, twin in ChunkTwins(twins.held, _unpacked_up, _unpacked_down).targets():
            stack.enter_context(patch(target, twin))
        for module in (rank_layer, rank_drafter):
            stack.enter_context(patch.object(module, "round_rows", twins.round_rows))
        stack.enter_context(patch("dsv4nb_kernels.peer_join.launch", twins.join))
        yield


class _Twins:
    """The calls, as the kernels are called; `dependent` and `scratch` mean nothing here."""

    def __init__(self) -> None:
        self._matrices: dict[tuple[int, int], Any] = {}  # of the packed ones, by their words' address and number
        self._spread: dict[int, Tensor] = {}  # what `hyper_mix` left for the experts, by the address of its room
        self._pushed: dict[int, Tensor] = {}  # the other GPU's half of a sum, by the address that it is pushed to

    def join(
        self, parts: Tensor, link: Link, *, out: Tensor | None = None, pushes: bool = True, takes: bool = True
    ) -> Tensor | None:
        """Push or take, as one CPU that stands for both GPUs does them in turn."""
        assert pushes != takes
        if takes:
            found = peer_join.peer_join(parts, self._pushed.pop(link.mine.words.data_ptr()))
            return found if out is None else out.copy_(found)
        assert link.theirs.words.data_ptr() not in self._pushed, "a half that nobody took"
        self._pushed[link.theirs.words.data_ptr()] = parts.sum(0, keepdim=True)
        return None

    def fp8_rows(
        self,
        rows: RoundedRows,
        matrix: Fp8Matrix,
        *,
        groups: int = 1,
        out: Tensor,
        dependent: bool = False,
        rows_are_older: bool = False,
    ) -> Tensor:
        weight = self.held(matrix.words, lambda: unpack_fp8(*fp8_kernel.unpack(matrix)))
        parts = zip(_values(rows).chunk(groups, 1), weight.chunk(groups), strict=True)
        return _put(out, torch.cat([_product(x, part) for x, part in parts], 1))

    def bf16_rows(self, x: Tensor, matrix: Bf16Matrix, *, out: Tensor, dependent: bool = False) -> Tensor:
        return _put(out, _product(x.float(), self.held(matrix.words, lambda: bf16_kernel.unpack(matrix).float())))

    def round_rows(self, x: Tensor, *, act_fp8: bool, out: RoundedRows, dependent: bool = False) -> RoundedRows:
        return _put_rounded(out, _bf16(x.sum(0) if x.ndim == 3 else x.float()), act_fp8)

    def hyper_mix(
        self,
        y: Tensor | None,
        stream: Tensor,
        before: Boundary | None,
        weights: HyperWeights,
        *,
        iterations: int,
        hc_eps: float,
        norm_eps: float,
        act_fp8: bool,
        spread: Any,
        out: Boundary,
        dependent: bool = False,
        link: Link | None = None,
        pushed: bool = False,
    ) -> Boundary:
        streams = stream.float()
        if y is not None and before is not None:
            assert pushed == (link is not None)
            joined = y.sum(0) if link is None else peer_join.peer_join(y, self._pushed.pop(link.mine.words.data_ptr()))
            streams = _bf16(hyper_mix.hyper_expand(_bf16(joined), streams, before.post, before.comb))
        out.stream.copy_(streams)
        rows, hc, width = streams.shape
        tiles = torch.zeros(rows, TILE, hc, width)
        tiles[:, 0] = streams
        fn, scale, base, tiles = weights.fn, weights.scale, weights.base, tiles.flatten(0, 1)
        pre = fn[:hc], scale[:hc], base[:hc]
        x = hyper_mix.hyper_collapse(tiles, *pre, hc_eps=hc_eps, norm_eps=norm_eps)[::TILE]
        out.x.copy_(rms_norm(_bf16(x), weights.norm, norm_eps))
        if len(fn) > hc:
            mixed = hyper_mix.hyper_mix(
                tiles, fn, scale, base, weights.norm, iterations=iterations, hc_eps=hc_eps, norm_eps=norm_eps
            )
            out.post.copy_(mixed.post[::TILE])
            out.comb.copy_(mixed.comb[::TILE])
        if out.arranged is None:
            _put_rounded(out.rounded, out.x.float(), act_fp8)
        else:
            put_chunk(out.arranged, out.x.float(), act_fp8)
        if spread is not None:
            self._spread[spread.values.data_ptr()] = _values(out.rounded)
        return out

    def norm_rope_rows(
        self,
        product: Tensor,
        latent_norm: Tensor,
        kv_norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        ring: Tensor,
        *,
        eps: float,
        act_fp8: bool,
        kv_fp8: bool,
        out: RoundedRows,
        dependent: bool = False,
    ) -> RoundedRows:
        low, rows = _bf16(product.sum(0)).split((len(latent_norm), len(kv_norm)), 1)
        rows = _bf16(rotate_tail(_bf16(rms_norm(rows, kv_norm, eps)), cos, sin))
        ring[slots.long()] = pack_records(rows, cos.shape[1]) if kv_fp8 else rows.bfloat16()
        return _put_rounded(out, _bf16(rms_norm(low, latent_norm, eps)), act_fp8)

    def norm_rope_heads(
        self, product: Tensor, cos: Tensor, sin: Tensor, *, heads: int, eps: float, out: Tensor, dependent: bool = False
    ) -> Tensor:
        query = _bf16(product.sum(0)).unflatten(1, (heads, -1))
        return out.copy_(norm_rope_write.norm_rope_heads(query, cos, sin, eps=eps))

    def compress(
        self,
        product: Tensor,
        offset: Tensor,
        position: Tensor,
        ring: Tensor,
        norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        entries: Tensor,
        *,
        eps: float,
        rounding: str,
        dependent: bool = False,
    ) -> None:
        first, ratio, width = int(position), len(offset), len(norm)
        halves = product.shape[2] // (2 * width)
        for i, row in enumerate(product.sum(0)):
            ring[(first + i) % len(ring)] = row + offset[(first + i) % ratio]
        for i in range(product.shape[1]):
            if (first + i) % ratio != ratio - 1:
                continue
            places = torch.arange(first + i + 1 - halves * ratio, first + i + 1)
            lines = ring[places % len(ring)].unflatten(1, (2, halves, width))
            half = torch.arange(len(places)) // ratio
            values, scores = (lines[torch.arange(len(places)), part, half] for part in (0, 1))
            scores = scores.masked_fill((places < 0)[:, None], -torch.inf)
            values = values.masked_fill((places < 0)[:, None], 0.0)
            entry = _bf16(rms_norm(_bf16(compress.compress(values[None], scores[None])), norm, eps))
            entry = _bf16(rotate_tail(entry, cos[i], sin[i]))
            if rounding == "index":
                entry = index_rows.index_rows(entry[None], torch.ones(1, 2), torch.zeros(1, 2), index_fp4=True)[0]
            entries[(first + i) // ratio] = (
                pack_records(entry, cos.shape[1])[0] if rounding == "kv" else entry[0].bfloat16()
            )

    def compress_both(
        self,
        product: Tensor,
        position: Tensor,
        cos: Tensor,
        sin: Tensor,
        entries: Any,
        keys: Any,
        *,
        eps: float,
        dependent: bool = False,
    ) -> None:
        first = 0
        for each in (entries, keys):
            line = each.offset.shape[1]
            self.compress(
                product[..., first : first + line], each.offset, position, each.ring, each.norm, cos, sin, each.entries,
                eps=eps, rounding=each.rounding,
            )  # fmt: skip
            first += line

    def index_rows(
        self,
        product: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        heads: int,
        index_fp4: bool,
        out: Tensor,
        dependent: bool = False,
    ) -> Tensor:
        query = _bf16(product.sum(0)).unflatten(1, (heads, -1))
        return out.copy_(index_rows.index_rows(query, cos, sin, index_fp4=index_fp4))

    def index_scores(
        self,
        query: Tensor,
        keys: Tensor,
        weights: Tensor,
        visible: Tensor,
        *,
        out: Tensor,
        dependent: bool = False,
    ) -> Tensor:
        shares = weights.sum(0)
        for i in range(len(query)):
            out[i] = index_scores.index_scores(query[i : i + 1].float(), keys.float(), shares[i : i + 1])[0]
        return out

    def top_entries(
        self, scores: Tensor, visible: Tensor, k: int, *, scratch: object, out: Tensor, dependent: bool = False
    ) -> Tensor:
        return out.copy_(top_entries.top_entries(scores, visible.long(), k))

    def sparse_attention(
        self,
        query: Tensor,
        window: Any,
        entries: Any,
        sink: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        scale: float,
        partials: object,
        out: RoundedRows,
        dependent: bool = False,
    ) -> RoundedRows:
        mixed = torch.empty(query.shape)
        for i in range(len(query)):
            splits = []
            for seen in (window, *(() if entries is None else (entries,))):
                for places in seen.places[i].split(SPLIT):
                    hidden = places < 0
                    held = kv_rows(seen.cache[places.clamp_min(0).long()], query.shape[2], cos.shape[1])
                    keys = held.float().masked_fill(hidden[:, None], 0.0)
                    splits.append((keys[None], hidden[None]))
            mixed[i] = sparse_attention.sparse_attention(query[i : i + 1].float(), splits, sink, scale=scale)[0]
        return _put_rounded(out, _bf16(rotate_tail(mixed, cos[:, None], sin[:, None])).flatten(1), False)

    def route(
        self,
        logits: Tensor,
        *,
        bias: Tensor | None,
        table: Tensor | None,
        tokens: Tensor | None,
        k: int,
        factor: float,
        out: tuple[Tensor, Tensor],
        dependent: bool = False,
    ) -> tuple[Tensor, Tensor]:
        lines = None if table is None or tokens is None else table[tokens.long()].long()
        experts, shares = route.route(logits.sum(0), bias=bias, table=lines, k=k, factor=factor)
        return out[0].copy_(experts), out[1].copy_(shares)

    def expert_up(
        self,
        rows: Any,
        experts: Tensor,
        weights: Tensor,
        up: UpWeights,
        *,
        limit: float,
        out: Tensor,
        dependent: bool = False,
    ) -> Tensor:
        gate_up = self.held(up.routed, lambda: _unpacked_up(up))
        lines = []
        for x, chosen, shares in zip(self._spread[rows.values.data_ptr()], experts, weights, strict=True):
            lines += [
                expert_up.clamped_swiglu(gate_up[expert] @ x, limit) * share
                for expert, share in zip([*chosen.tolist(), -1], [*shares.tolist(), 1.0], strict=True)
            ]
        return out.copy_(torch.stack([*lines, torch.zeros_like(lines[0])]))

    def expert_down(
        self,
        inner: Tensor,
        experts: Tensor,
        down: DownWeights,
        *,
        rounded: Tensor,
        out: Tensor,
        dependent: bool = False,
    ) -> Tensor:
        weight = self.held(down.routed, lambda: _unpacked_down(down))
        k = experts.shape[1]
        lines = round_fp8(inner, BLOCK)
        for i, chosen in enumerate(experts.tolist()):
            first = i * (k + 1)
            out[i] = weight[-1] @ lines[first + k]
            for j, expert in enumerate(chosen):
                out[i] += weight[expert] @ lines[first + j]
        return out

    def markov_step(
        self,
        base: Tensor,
        tokens: Tensor,
        markov_in: Tensor,
        markov_out: Tensor,
        first_id: int = 0,
        *,
        parts: object,
        out: Scored,
        dependent: bool = False,
    ) -> Scored:
        found = markov_step.markov_step(base, tokens.long(), markov_in.float(), markov_out.float(), first_id)
        for room, value in zip((out.logits, *out.best), found, strict=True):
            room.copy_(value)
        return out

    def draw(
        self,
        logits: Tensor,
        settings: Settings,
        stages: Stages,
        *,
        scratch: object,
        out: Drawn,
        dependent: bool = False,
    ) -> Drawn:
        rules = [_rule(*line) for line in zip(settings.numbers.tolist(), settings.whole.tolist(), strict=True)]
        assert stages.covers(Stages.of(rules)), (stages, rules)
        for room, value in zip(out, draw.draw(logits, rules), strict=True):
            room.copy_(value)
        return out

    def held(self, words: Tensor, unpack: Any) -> Any:
        address = words.data_ptr(), words.numel()  # a matrix may be the first rows of another one
        if address not in self._matrices:
            self._matrices[address] = words, unpack()  # as long as the words are held, nothing else stands there
        return self._matrices[address][1]


def _rule(numbers: Sequence[float], whole: Sequence[int]) -> draw.Rule:
    """What a row asks for, of its lines in `Settings`."""
    temperature, top_p, low, *_, is_greedy, _ = numbers
    top_k, seed, position, stream = whole
    return draw.Rule(
        temperature=0.0 if is_greedy else temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=math.exp(low),
        seed=seed % (1 << 64),
        position=position,
        stream=stream,
    )


def _unpacked_up(up: UpWeights) -> Tensor:
    """[E + 1, 2I, D], gate rows first; the shared expert stands last."""
    gate, above, shared_gate, shared_above = unpack_up(up)
    routed = torch.cat((unpack_fp4(*gate), unpack_fp4(*above)), 1)
    return torch.cat((routed, torch.cat((unpack_fp8(*shared_gate), unpack_fp8(*shared_above)))[None]))


def _unpacked_down(down: DownWeights) -> Tensor:
    """[E + 1, D, I]."""
    routed, shared = unpack_down(down)
    return torch.cat((unpack_fp4(*routed), unpack_fp8(*shared)[None]))


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([weight @ row for row in x])


def _put(out: Tensor, product: Tensor) -> Tensor:
    """A product as parts whose sum it is."""
    out.zero_()
    out[0] = product
    return out


def _put_rounded(out: RoundedRows, x: Tensor, act_fp8: bool) -> RoundedRows:
    """bfloat16 values, rounded to e4m3 or not, as codes and scales."""
    values = round_fp8(x, BLOCK) if act_fp8 else x
    peaks = values.unflatten(1, (-1, BLOCK)).abs().amax(2).clamp_min(1e-30)
    scales = torch.exp2(torch.ceil(torch.log2(peaks / 32768.0)))
    out.codes.copy_((values.unflatten(1, (-1, BLOCK)) / scales[:, :, None]).flatten(1))
    out.scales.zero_()
    out.scales[:, : len(x)] = scales.mT
    return out


def _values(rows: RoundedRows) -> Tensor:
    return rows.codes.float() * rows.scales[:, : len(rows.codes)].mT.repeat_interleave(BLOCK, 1)


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()
