"""Stored tensors of one block → what its kernels read; pure but for the device that the tensors are on.

Codes keep their bits. What is added is zeros: heads, groups, columns and experts that a model smaller than V4-Flash
lacks (`kernel_shapes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4nb.checkpoint.config import LayerKind, ModelConfig
from dsv4nb.errors import CheckpointError
from dsv4nb.weights.kernel_shapes import KernelShapes
from dsv4nb.weights.packing import FP8_TILE
from dsv4nb.weights.rank_store import RankAttention, RankCompressor, RankExperts, RankIndexer, RankLayer
from dsv4nb_kernels import bf16_rows, fp8_rows
from dsv4nb_kernels._expert_weights import DownWeights, UpWeights, pack_routed_down, pack_routed_up, pack_shared_up
from dsv4nb_kernels.bf16_rows import Bf16Matrix
from dsv4nb_kernels.hyper_mix import HyperWeights

Stored = tuple[Tensor, Tensor]  # a matrix's codes and its e8m0 bytes, uint8

EXPERTS_AT_ONCE = 16  # packing takes several times the room of what it packs
_ONE = 127  # the e8m0 byte of 1


class StoredBlock:
    """The tensors of one block for one rank, by their names inside it, as the file has them; each is taken once.

    Args:
        names: "attn.wq_a.weight" and so on, all that there are.
        take: returns tensors that are alike, under each other.
    """

    def __init__(self, names: Container[str], take: Callable[[tuple[str, ...]], Tensor]) -> None:
        self._names, self._take = names, take

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def raw(self, name: str) -> Tensor:
        """Return a tensor as it is stored."""
        return self._take((name,))[0]

    def floats(self, name: str) -> Tensor:
        """Return a tensor of numbers as float32."""
        return self.raw(name).to(torch.float32)

    def bf16(self, name: str) -> Tensor:
        """Return a matrix that the kernels read as bfloat16.

        Raises:
            CheckpointError: it is stored in another format.
        """
        found = self.raw(name)
        if found.dtype != torch.bfloat16:
            raise CheckpointError(f"{name} is stored as {found.dtype}; the GPU engine reads bfloat16", param=name)
        return found

    def matrix(self, name: str) -> Stored:
        """Return the codes and scales of a quantised projection.

        Raises:
            CheckpointError: it is stored without scales.
        """
        codes, scales = self.matrices([name])
        return codes[0], scales[0]

    def matrices(self, names: Sequence[str]) -> Stored:
        """Return the codes and scales of projections that are alike, under each other.

        Raises:
            CheckpointError: one is stored without scales.
        """
        for name in names:
            if f"{name}.scale" not in self:
                raise CheckpointError(f"{name}.weight has no scale; the GPU engine reads FP8 projections", param=name)
        codes, scales = (self._take(tuple(f"{name}.{leaf}" for name in names)) for leaf in ("weight", "scale"))
        return codes, scales


def pack_layer(
    blocks: Sequence[StoredBlock], config: ModelConfig, shapes: KernelShapes, *, kind: LayerKind, ratio: int
) -> list[RankLayer]:
    """Pack one layer for each of some ranks, all with as much of it.

    The ranks take turns after every few experts, so that little is there as it is stored.

    Raises:
        CheckpointError: a tensor is stored in a format that the kernels do not read.
        ValueError: a pack function refuses a tensor.
    """
    halves = _halves(blocks, config, shapes)
    return [
        RankLayer(
            kind=kind,
            ratio=ratio,
            hyper_attention=pack_hyper(block, config, "hc_attn", "attn_norm.weight"),
            attention=_attention(block, config, shapes, ratio),
            hyper_experts=pack_hyper(block, config, "hc_ffn", "ffn_norm.weight"),
            experts=_experts(block, config, shapes, up, down),
        )
        for block, (up, down) in zip(blocks, halves, strict=True)
    ]


def groups_of_experts(config: ModelConfig) -> Iterator[range]:
    """Yield the routed experts that are packed at once."""
    for first in range(0, config.n_routed_experts, EXPERTS_AT_ONCE):
        yield range(first, min(first + EXPERTS_AT_ONCE, config.n_routed_experts))


def pack_hyper(block: StoredBlock, config: ModelConfig, name: str, norm: str) -> HyperWeights:
    """Pack the coefficients of a boundary, with one scale for each row of them."""
    fn, scale = block.floats(f"{name}_fn"), block.floats(f"{name}_scale")
    parts = [config.hc_mult, config.hc_mult, config.hc_mult**2] if len(scale) == 3 else [fn.shape[0]]
    return HyperWeights(
        fn=fn.contiguous(),
        scale=scale.repeat_interleave(torch.tensor(parts, device=scale.device)),
        base=block.floats(f"{name}_base").contiguous(),
        norm=block.floats(norm).contiguous(),
    )


def first_rows(matrix: Bf16Matrix, rows: int, *, is_shared: bool) -> Bf16Matrix:
    """Return the first rows of a packed matrix, a multiple of 16: its tiles lie one behind the other.

    Args:
        is_shared: the whole matrix is kept too, so the rows are a view of it; else they are all that is kept.
    """
    if rows == matrix.n:
        return matrix
    words = matrix.words[: rows * matrix.k // 2]
    return Bf16Matrix(words=words if is_shared else words.clone(), n=rows, k=matrix.k)


def no_rows(width: int, device: torch.device) -> Bf16Matrix:
    """Return the matrix of no rows, which nothing multiplies by."""
    return Bf16Matrix(words=torch.empty(0, dtype=torch.int32, device=device), n=0, k=width)


def no_hyper(device: torch.device) -> HyperWeights:
    """Return the boundary of no coefficients, which nothing goes through."""
    return HyperWeights(**{name: torch.empty(0, device=device) for name in ("fn", "scale", "base", "norm")})


def _attention(block: StoredBlock, config: ModelConfig, shapes: KernelShapes, ratio: int) -> RankAttention:
    latent, width, heads = config.q_lora_rank, config.head_dim, config.num_attention_heads
    low = _wider_mean(_grown(block.matrix("attn.wq_a"), shapes.latent, config.hidden_size), latent, shapes.latent)
    grown = shapes.groups * config.o_lora_rank
    per_group = shapes.heads * width // shapes.groups
    q_norm = block.floats("attn.q_norm.weight")
    plain = RankAttention(
        down=_fp8(_below(low, block.matrix("attn.wkv"))),
        q_norm=pad(q_norm * math.sqrt(latent / shapes.latent), (0, shapes.latent - latent)),
        kv_norm=block.floats("attn.kv_norm.weight").contiguous(),
        query=_fp8(_grown(block.matrix("attn.wq_b"), shapes.heads * width, shapes.latent)),
        sink=pad(block.floats("attn.attn_sink"), (0, shapes.heads - heads)),
        groups=_fp8(_grown(block.matrix("attn.wo_a"), grown, per_group)),
        out=_fp8(_grown(block.matrix("attn.wo_b"), config.hidden_size, grown)),
    )
    if not ratio:
        return plain
    source, compress = _compressor(block, "attn.compressor.")
    if ratio != 4:
        sources = bf16_rows.pack(source)
        return replace(plain, sources=sources, compressor=compress(sources))
    query = _grown(block.matrix("attn.indexer.wq_b"), shapes.index_heads * config.index_head_dim, shapes.latent)
    shares = block.bf16("attn.indexer.weights_proj.weight")
    shares = pad(shares, (0, 0, 0, shapes.index_heads - shares.shape[0]))
    keys, compress_keys = _compressor(block, "attn.indexer.compressor.")
    sources = bf16_rows.pack(torch.cat((source, keys, shares)))
    return replace(
        plain,
        sources=sources,
        compressor=compress(_rows_of(sources, 0, len(source))),
        indexer=RankIndexer(
            query=_fp8(query),
            heads=_rows_of(sources, len(source) + len(keys), len(shares)),
            compressor=compress_keys(_rows_of(sources, len(source), len(keys))),
        ),
    )


def _compressor(block: StoredBlock, name: str) -> tuple[Tensor, Callable[[Bf16Matrix], RankCompressor]]:
    """Return the matrix of a compressor, value rows first, and what makes one of its packed form."""
    scores = block.floats(f"{name}ape")
    source = torch.cat((block.bf16(f"{name}wkv.weight"), block.bf16(f"{name}wgate.weight")))
    offset = torch.cat((torch.zeros_like(scores), scores), 1)
    norm = block.floats(f"{name}norm.weight").contiguous()
    return source, lambda packed: RankCompressor(source=packed, offset=offset, norm=norm)


def _rows_of(matrix: Bf16Matrix, first: int, rows: int) -> Bf16Matrix:
    """Return rows of a packed matrix, whole tiles of 16, as a view of it."""
    words = matrix.words[first * matrix.k // 2 : (first + rows) * matrix.k // 2]
    return Bf16Matrix(words=words, n=rows, k=matrix.k)


def _experts(
    block: StoredBlock, config: ModelConfig, shapes: KernelShapes, up: UpWeights, down: DownWeights
) -> RankExperts:
    missing = shapes.experts - config.n_routed_experts
    gate = pad(block.bf16("ffn.gate.weight"), (0, 0, 0, missing))
    table = bias = None
    if "ffn.gate.tid2eid" in block:
        table = block.raw("ffn.gate.tid2eid").to(torch.int32)
    else:
        bias = pad(block.floats("ffn.gate.bias"), (0, missing), value=-math.inf)
    return RankExperts(gate=bf16_rows.pack(gate), bias=bias, table=table, up=up, down=down)


def _halves(
    blocks: Sequence[StoredBlock], config: ModelConfig, shapes: KernelShapes
) -> list[tuple[UpWeights, DownWeights]]:
    inner, hidden = shapes.inner, config.hidden_size
    shared = [_shared(block, inner, hidden) for block in blocks]
    packed: list[list[Tensor]] = [[] for _ in blocks]
    for some in groups_of_experts(config):
        for block, whole in zip(blocks, packed, strict=True):
            gate, up = (_routed(block, some, w, inner, hidden) for w in ("w1", "w3"))
            _put(whole, 0, pack_routed_up(gate, up), some, config.n_routed_experts)
            del gate, up
            down = _routed(block, some, "w2", hidden, inner)
            _put(whole, 1, pack_routed_down(down), some, config.n_routed_experts)
            del down
    return [
        (UpWeights(routed=up, shared=shared_up), DownWeights(routed=down, shared=shared_down))
        for (up, down), (shared_up, shared_down) in zip(packed, shared, strict=True)
    ]


def _shared(block: StoredBlock, inner: int, hidden: int) -> tuple[fp8_rows.Fp8Matrix, fp8_rows.Fp8Matrix]:
    gate, up = (_grown(block.matrix(f"ffn.shared_experts.{w}"), inner, hidden) for w in ("w1", "w3"))
    return pack_shared_up(gate, up), _fp8(_grown(block.matrix("ffn.shared_experts.w2"), hidden, inner))


def _put(whole: list[Tensor], place: int, part: Tensor, experts: range, count: int) -> None:
    """Put some experts into the tensor of all `count`, which their first ones make."""
    if not experts.start:
        whole.append(part.new_empty((count, *part.shape[1:])))
    whole[place][experts.start : experts.stop] = part


def _routed(block: StoredBlock, experts: range, name: str, rows: int, columns: int) -> Stored:
    """[E, N, K/2] codes and [E, N, K/32] scales of some experts, filled up."""
    codes, scales = block.matrices([f"ffn.experts.{expert}.{name}" for expert in experts])
    down, across = rows - codes.shape[1], columns - 2 * codes.shape[2]
    if not down and not across:
        return codes.view(torch.uint8), scales
    codes = pad(codes.view(torch.uint8), (0, across // 2, 0, down))
    return codes, pad(scales, (0, across // 32, 0, down), value=_ONE)


def _grown(stored: Stored, rows: int, columns: int) -> Stored:
    """Fill an FP8 matrix up to [rows, columns] with zeros."""
    codes, scales = stored
    bits = pad(codes.view(torch.uint8), (0, columns - codes.shape[1], 0, rows - codes.shape[0]))
    down, across = -(-rows // FP8_TILE) - scales.shape[0], -(-columns // FP8_TILE) - scales.shape[1]
    return bits.view(torch.float8_e4m3fn), pad(scales, (0, across, 0, down), value=_ONE)


def _wider_mean(stored: Stored, width: int, grown: int) -> Stored:
    """Let the mean square of a row that was filled up to `grown` columns be that of its own `width` columns."""
    codes, scales = stored
    return codes, scales + (grown // width).bit_length() // 2  # twice as large for four times as wide


def _below(above: Stored, below: Stored) -> Stored:
    """Put a matrix under another one whose rows are whole tiles."""
    assert above[0].shape[0] % FP8_TILE == 0, above[0].shape
    codes = torch.cat((above[0].view(torch.uint8), below[0].view(torch.uint8)))
    return codes.view(torch.float8_e4m3fn), torch.cat((above[1], below[1]))


def _fp8(stored: Stored) -> fp8_rows.Fp8Matrix:
    return fp8_rows.pack(stored[0].contiguous(), stored[1].contiguous())
