"""Attention in plain PyTorch, with all scores in memory, and the mask and dropout of a call."""

import functools

import torch
from torch import Tensor
from typing_extensions import Unpack

from parallel_ops._internal.philox import kept_scale
from parallel_ops._internal.tensor_format import TensorFormat, from_sbhd, to_sbhd
from parallel_ops._internal.token_range import TokenRange
from parallel_ops.ops.attention.block import Dropout, dropout_keep_mask
from parallel_ops.ops.attention.options import AttentionArguments, AttentionOptions, attention_options
from parallel_ops.ops.attention.ranges import MaskBounds, attention_bounds, dense_mask
from parallel_ops.ops.softmaxes.shared import visible_softmax


def flash_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, tensor_format: TensorFormat = "sbhd", **arguments: Unpack[AttentionArguments]
) -> Tensor:
    """The same in plain PyTorch, all scores in memory, whatever the backend."""
    q, k, v = (to_sbhd(t, tensor_format) for t in (q, k, v))
    return from_sbhd(reference(q, k, v, attention_options("flash_attention", q, k, v, **arguments)), tensor_format)


def reference(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    (sq, b, heads, _), sk = q.shape, k.shape[0]
    scores, visible = logits_of(q, k, options)
    weights = visible_softmax(scores, ~visible, options.sink)
    v = v.repeat_interleave(heads // v.shape[2], dim=2).permute(1, 2, 0, 3)
    dropout = dropout_of(sq, sk, options)
    if dropout is not None:
        keep = dropout_keep_mask(dropout, b, heads, sq, sk)
        weights = torch.where(keep, weights * kept_scale(options.dropout_p), 0.0)
    return (weights @ v).permute(2, 0, 1, 3)


def logits_of(q: Tensor, k: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """The logits ``[b, heads, sq, sk]``, and which are visible ``[sq, sk]``."""
    (sq, _, heads, _), sk = q.shape, k.shape[0]
    k = k.repeat_interleave(heads // k.shape[2], dim=2)
    scores = q.permute(1, 2, 0, 3) @ k.permute(1, 2, 3, 0) * options.softmax_scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    mask = mask_of(sq, sk, options)
    nothing = torch.zeros(sq, sk, dtype=torch.bool, device=q.device)
    return scores, nothing if mask is None else dense_mask(mask, sq, sk, q.device)


def mask_of(sq: int, sk: int, options: AttentionOptions, from_keys: bool = False) -> MaskBounds | None:
    if not options.packed:
        return _bounds(sq, sk, options.left, options.right)
    queries = TokenRange(sk - sq, sq)
    return attention_bounds(
        queries, TokenRange(0, sk), left=options.left, right=options.right, ranges=options.ranges(sq),
        first_query=queries.start, from_keys=from_keys,
    )  # fmt: skip


@functools.lru_cache(1024)  # it takes the host as long as a launch
def _bounds(sq: int, sk: int, left: int | None, right: int | None) -> MaskBounds | None:
    return attention_bounds(TokenRange(sk - sq, sq), TokenRange(0, sk), left=left, right=right)


def dropout_of(sq: int, sk: int, options: AttentionOptions) -> Dropout | None:
    if options.dropout_seed is None:
        return None
    queries, keys = TokenRange(max(sk - sq, 0), sq), TokenRange(0, sk)
    return Dropout(options.dropout_p, options.dropout_seed, queries, keys, options.first_head)
