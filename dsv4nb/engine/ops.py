"""One name per operation. On a CPU each is bound to its twin."""

from dsv4nb_kernels.reference._norm import rms_norm
from dsv4nb_kernels.reference._rotary import rotate_tail
from dsv4nb_kernels.reference._tiles import TILE
from dsv4nb_kernels.reference.bf16_rows import bf16_rows
from dsv4nb_kernels.reference.compress import compress
from dsv4nb_kernels.reference.expert_down import expert_down
from dsv4nb_kernels.reference.expert_up import Span, expert_up
from dsv4nb_kernels.reference.fp8_rows import fp8_rows
from dsv4nb_kernels.reference.hyper_mix import Mixed, hyper_collapse, hyper_expand, hyper_head, hyper_mix
from dsv4nb_kernels.reference.index_rows import index_rows
from dsv4nb_kernels.reference.index_scores import index_scores, padded_keys
from dsv4nb_kernels.reference.norm_rope_write import (
    norm_rope_heads,
    norm_rope_rows,
    rope_entries,
    write_rows,
)
from dsv4nb_kernels.reference.route import route
from dsv4nb_kernels.reference.sparse_attention import sparse_attention
from dsv4nb_kernels.reference.top_entries import ABSENT, top_entries

__all__ = [
    "ABSENT",
    "TILE",
    "Mixed",
    "Span",
    "bf16_rows",
    "compress",
    "expert_down",
    "expert_up",
    "fp8_rows",
    "hyper_collapse",
    "hyper_expand",
    "hyper_head",
    "hyper_mix",
    "index_rows",
    "index_scores",
    "norm_rope_heads",
    "norm_rope_rows",
    "padded_keys",
    "rms_norm",
    "rope_entries",
    "rotate_tail",
    "route",
    "sparse_attention",
    "top_entries",
    "write_rows",
]
