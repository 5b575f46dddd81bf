"""The twins behind the calls of a prompt's chunk; see `twin_kernels`.

Rows are computed one by one, so a row does not depend on those beside it, as the kernels promise; products add 128
columns at a time, from zero, as the kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dsv4nb.weights.packing import unpack_fp8
from dsv4nb_kernels import bf16_rows, fp8_rows
from dsv4nb_kernels._chunk_plan import ROWS, Plan
from dsv4nb_kernels._chunk_rows import ChunkRows, column_order
from dsv4nb_kernels._expert_weights import DownWeights, UpWeights
from dsv4nb_kernels._kv_records import Unpacked
from dsv4nb_kernels._rounded_rows import BLOCK
from dsv4nb_kernels.bf16_rows import Bf16Matrix
from dsv4nb_kernels.chunk_attention import Entries, Window
from dsv4nb_kernels.fp8_rows import Fp8Matrix
from dsv4nb_kernels.reference import expert_down_chunk, expert_up_chunk, sparse_attention
from dsv4nb_kernels.reference._fp8 import round_fp8
from dsv4nb_kernels.reference._norm import rms_norm
from dsv4nb_kernels.reference._records import pack_records, unpack_records
from dsv4nb_kernels.reference._rotary import rotate_tail

_INNER = 128.0  # inner rows are stored so many times as large

Held = Callable[[Tensor, Callable[[], Any]], Any]  # of packed words and what unpacks them


class ChunkTwins:
    """The calls, as the kernels are called.

    Args:
        held: keeps what was made of packed words, by their address.
        up, down: unpack experts: [E + 1, 2I, D] and [E + 1, D, I], the shared one last.
    """

    def __init__(self, held: Held, up: Callable[[UpWeights], Tensor], down: Callable[[DownWeights], Tensor]) -> None:
        self._held, self._up, self._down = held, up, down

    def targets(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield where each call is looked up, and what stands there instead."""
        for name in ("bf16_chunk", "chunk_attention", "expert_down_chunk", "expert_up_chunk", "fp8_chunk"):
            yield f"dsv4nb_kernels.{name}.{name}", getattr(self, name)
        yield "dsv4nb_kernels._chunk_plan.plan_chunk", self.plan_chunk
        yield "dsv4nb_kernels._round_chunk.round_chunk", self.round_chunk
        yield "dsv4nb_kernels._kv_records.unpack_records", self.unpack_records
        yield "dsv4nb_kernels.norm_rope_write.norm_rope_chunk", self.norm_rope_chunk

    def fp8_chunk(self, rows: ChunkRows, matrix: Fp8Matrix, *, groups: int = 1, out: Tensor) -> Tensor:
        weight = self._held(matrix.words, lambda: unpack_fp8(*fp8_rows.unpack(matrix)))
        parts = zip(chunk_values(rows).chunk(groups, 1), weight.chunk(groups), strict=True)
        out[0] = torch.cat([_product(x, part) for x, part in parts], 1)
        return out

    def bf16_chunk(self, x: Tensor, matrix: Bf16Matrix, *, out: Tensor, dependent: bool = False) -> Tensor:
        out.zero_()
        out[0] = _product(x.float(), self._held(matrix.words, lambda: bf16_rows.unpack(matrix).float()))
        return out

    def round_chunk(self, x: Tensor, *, act_fp8: bool, out: ChunkRows, dependent: bool = False) -> ChunkRows:
        return put_chunk(out, _bf16(x.sum(0) if x.ndim == 3 else x.float()), act_fp8)

    def norm_rope_chunk(
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
        out: ChunkRows,
        dependent: bool = False,
    ) -> ChunkRows:
        low, rows = _bf16(product.sum(0)).split((len(latent_norm), len(kv_norm)), 1)
        rows = _bf16(rotate_tail(_bf16(rms_norm(rows, kv_norm, eps)), cos, sin))
        ring[slots.long()] = pack_records(rows, cos.shape[1]) if kv_fp8 else rows.bfloat16()
        return put_chunk(out, _bf16(rms_norm(low, latent_norm, eps)), act_fp8)

    def unpack_records(self, first: Unpacked, second: Unpacked | None, *, tail: int) -> None:
        for each in (first, *(() if second is None else (second,))):
            each.rows.copy_(kv_rows(each.records, each.rows.shape[1], tail))

    def chunk_attention(
        self,
        query: Tensor,
        position: Tensor,
        window: Window,
        entries: Entries | None,
        sink: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        scale: float,
        out: Tensor,
    ) -> Tensor:
        assert len(window.ring) >= len(query) + window.width - 1
        back = torch.arange(window.width - 1, -1, -1)
        for i, row in enumerate(query.float()):
            at = int(position) + i
            seen = at - back
            splits = [_split(window.ring, seen % len(window.ring), seen < 0)]
            if entries is not None:
                visible = (at + 1) // entries.ratio
                places = torch.arange(len(entries.cache)) if entries.places is None else entries.places[i].long()
                splits.append(_split(entries.cache, places, (torch.arange(len(places)) >= visible) | (places < 0)))
            mixed = sparse_attention.sparse_attention(row[None], splits, sink, scale=scale)[0]
            out[i] = rotate_tail(mixed, cos[i], sin[i])
        return out

    def plan_chunk(self, experts: Tensor, experts_total: int, *, out: Plan) -> Plan:
        flat = experts.flatten()
        order = torch.argsort(flat, stable=True)
        out.order.copy_(order)
        out.places.copy_(torch.argsort(order))
        out.counts.copy_(torch.bincount(flat, minlength=experts_total))
        out.ends.copy_(out.counts.cumsum(0))
        out.tile_experts.fill_(-1)
        number = 0
        for expert, (end, count) in enumerate(zip(out.ends.tolist(), out.counts.tolist(), strict=True)):
            for place in range(end - count, end, ROWS):
                out.tile_experts[number], out.tile_places[number] = expert, place
                number += 1
        return out

    def expert_up_chunk(
        self, rows: ChunkRows, plan: Plan, weights: Tensor, up: UpWeights, peaks: Tensor, *, limit: float, out: Tensor
    ) -> Tensor:
        matrices, (count, k) = self._held(up.routed, lambda: self._up(up)), weights.shape
        experts, places = _experts(plan, k), plan.places.view(count, k).long()
        for i, x in enumerate(chunk_values(rows)):
            inner = expert_up_chunk.expert_up_chunk(
                x[None], experts[i : i + 1], weights[i : i + 1], matrices, limit=limit, act_fp8=False
            )[0]
            lines = round_fp8(inner, BLOCK)[:, column_order(up.inner)] * _INNER
            out[places[i]], out[count * k + i] = lines[:k].half(), lines[k].half()
        return out

    def expert_down_chunk(
        self, inner: Tensor, plan: Plan, down: DownWeights, peaks: Tensor, *, rows: int, parts: Tensor, out: Tensor
    ) -> Tensor:
        matrices, k = self._held(down.routed, lambda: self._down(down)), len(plan.order) // rows
        experts, places = _experts(plan, k), plan.places.view(rows, k).long()
        lines = inner[:, column_order(down.inner).argsort()].float() / _INNER
        for i in range(rows):
            own = lines[torch.cat((places[i], torch.tensor([rows * k + i])))]
            out[i] = expert_down_chunk.expert_down_chunk(own[None], experts[i : i + 1], matrices, act_fp8=False)[0]
        return out


def kv_rows(cache: Tensor, width: int, tail: int) -> Tensor:
    """Return the rows that a cache holds, as records or as they are: [C, width] bfloat16."""
    return unpack_records(cache, width, tail) if cache.dtype == torch.uint8 else cache


def put_chunk(out: ChunkRows, x: Tensor, act_fp8: bool) -> ChunkRows:
    """bfloat16 values, rounded to e4m3 or not, as values under one scale in the order of the instructions."""
    values = round_fp8(x, BLOCK) if act_fp8 else x
    scales = torch.exp2(torch.ceil(torch.log2(values.abs().amax(1).clamp_min(1e-30) / 32768.0)))
    out.values.copy_((values / scales[:, None])[:, column_order(x.shape[1])])
    out.scales.copy_(scales)
    return out


def chunk_values(rows: ChunkRows) -> Tensor:
    """Inverse of `put_chunk`."""
    return rows.values[:, column_order(rows.values.shape[1]).argsort()].float() * rows.scales[:, None]


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Add up 128 columns at a time: [T, K] and [N, K] -> [T, N]."""
    blocks = weight.unflatten(1, (-1, BLOCK)).permute(1, 2, 0).contiguous()
    return torch.stack([torch.bmm(row.view(-1, 1, BLOCK), blocks).sum(0)[0] for row in x])


def _experts(plan: Plan, k: int) -> Tensor:
    """Who each row chose, [T, K]."""
    return torch.searchsorted(plan.ends, plan.places, right=True).view(-1, k)


def _split(cache: Tensor, places: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    keys = cache[places.clamp_min(0)].float().masked_fill(hidden[:, None], 0.0)
    return keys[None], hidden[None]


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()
