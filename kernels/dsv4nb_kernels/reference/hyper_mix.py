"""The residual streams around one sublayer: mix in, collapse, normalise, mix out (model.md 3.1)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4nb_kernels.reference._norm import inverse_rms, rms_norm
from dsv4nb_kernels.reference._tiles import tiled_product


class Mixed(NamedTuple):
    """What `hyper_mix` hands to the sublayer and to `hyper_expand`.

    Attributes:
        x: [R, D], the sublayer's normalised input.
        post: [R, HC], how much of its output each stream takes.
        comb: [R, HC, HC], from stream j to stream k.
    """

    x: Tensor
    post: Tensor
    comb: Tensor


def hyper_mix(
    stream: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm: Tensor,
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
) -> Mixed:
    """Compute a sublayer's coefficients from the streams, collapse them with it and normalise.

    Args:
        stream: [R, HC, D], R a multiple of 8.
        fn: [2 HC + HC², HC·D]; scale, base: [2 HC + HC²], the three scales each repeated over its part.
        norm: [D], the sublayer's norm weight.
        iterations: Sinkhorn passes over the columns; rows are balanced in between.
    """
    hc = stream.shape[1]
    mixes = _mixes(stream, fn, norm_eps) * scale + base
    pre = torch.sigmoid(mixes[:, :hc]) + hc_eps
    post = torch.sigmoid(mixes[:, hc : 2 * hc]) * 2.0
    comb = balance(torch.unflatten(mixes[:, 2 * hc :], -1, (hc, hc)), iterations, hc_eps)
    return Mixed(rms_norm(_collapse(stream, pre), norm, norm_eps), post, comb)


def balance(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Softmax over rows, then Sinkhorn passes; the first and the last balance columns: [R, HC, HC]."""
    raised = torch.exp(logits - logits.amax(-1, keepdim=True))
    # entries of one row of R lie far apart: every sum runs over whole vectors of rows
    comb = (raised / raised.sum(-1, keepdim=True) + eps).permute(1, 2, 0).contiguous()
    margin = torch.full((), eps)
    comb /= comb.sum(0, keepdim=True) + margin
    for _ in range(iterations - 1):
        comb /= comb.sum(1, keepdim=True) + margin
        comb /= comb.sum(0, keepdim=True) + margin
    return comb.permute(2, 0, 1)


def hyper_expand(y: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Add a sublayer's output to the mixed streams: [R, D] and [R, HC, D] -> [R, HC, D]."""
    return torch.baddbmm(post[:, :, None] * y[:, None, :], comb.mT, stream)


def hyper_head(
    stream: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor, *, hc_eps: float, norm_eps: float
) -> Tensor:
    """Collapse the streams after the last layer and normalise: [R, HC, D] -> [R, D].

    Args:
        fn: [HC, HC·D]; scale: [1]; base: [HC]; norm: [D], the final norm weight.
    """
    return rms_norm(hyper_collapse(stream, fn, scale, base, hc_eps=hc_eps, norm_eps=norm_eps), norm, norm_eps)


def hyper_collapse(
    stream: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, hc_eps: float, norm_eps: float
) -> Tensor:
    """Collapse as `hyper_head` does, without the norm: [R, HC, D] -> [R, D]."""
    pre = torch.sigmoid(_mixes(stream, fn, norm_eps) * scale + base) + hc_eps
    return _collapse(stream, pre)


def _mixes(stream: Tensor, fn: Tensor, eps: float) -> Tensor:
    flat = stream.flatten(1)
    return tiled_product(flat, fn) * inverse_rms(flat, eps)


def _collapse(stream: Tensor, pre: Tensor) -> Tensor:
    return (pre[:, :, None] * stream).sum(1)
