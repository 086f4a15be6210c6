"""Argument checks that all attention shares: each raises before any kernel starts and names op and argument."""

import math

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_floating, check_same_device, check_same_dtype
from parallel_ops.ops.softmaxes.shared import check_scale


def check_attention(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    sink: Tensor | None,
    softcap: float | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Everything but dropout, which ``dropout_seed`` checks."""
    _check_shapes(op, q, k, v)
    sq, sk = q.shape[0], k.shape[0]
    if not isinstance(causal, bool):
        raise TypeError(f"{op}: causal must be a bool, got {type(causal).__name__}")
    if causal and sq > sk:
        raise ValueError(
            f"{op}: q has {sq} queries for the {sk} keys of k, so the first would see no key; causal attention needs "
            "at least as many keys as queries"
        )
    if scale is not None:
        check_scale(op, scale)
    if window is not None:
        _check_window(op, window, causal)
    if sink is not None:
        check_floating(op, "sink", sink)
        check_same_device(op, "sink", sink, "q", q)
        if sink.shape != (q.shape[2],):
            raise ValueError(
                f"{op}: sink must have shape [{q.shape[2]}], one for each head of q, got {list(sink.shape)}"
            )
    if softcap is not None:
        if isinstance(softcap, bool) or not isinstance(softcap, (float, int)):
            raise TypeError(f"{op}: softcap must be a Python float or None, got {type(softcap).__name__}")
        if not 0 < softcap < math.inf:
            raise ValueError(f"{op}: softcap must be finite and above 0 (None for no cap), got {softcap}")
    if cu_seqlens is not None:
        _check_documents(op, q, k, cu_seqlens)


def _check_shapes(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_floating(op, name, t)
        if t is not q:
            check_same_device(op, name, t, "q", q)
            check_same_dtype(op, name, t, "q", q)
        if t.dim() != 4:
            raise ValueError(f"{op}: {name} must be [s, b, heads, d], got {list(t.shape)}")
    (_, b, heads, d), (_, kb, kv_heads, kd) = q.shape, k.shape
    if (kb, kd) != (b, d):
        raise ValueError(f"{op}: k must have the batch {b} and the d {d} of q, got {list(k.shape)}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{op}: k has {kv_heads} heads, which do not divide the {heads} heads of q")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"{op}: v must have the shape of k, {list(k.shape)}, but for d, got {list(v.shape)}")
    for name, t in (("q", q), ("v", v)):
        if t.shape[3] == 0:
            raise ValueError(f"{op}: the last dimension of {name} must be at least 1, got 0")


def _check_window(op: str, window: int, causal: bool) -> None:
    if isinstance(window, bool) or not isinstance(window, (int, torch.SymInt)):
        raise TypeError(f"{op}: window must be an int or None, got {type(window).__name__}")
    if window < 1:
        raise ValueError(f"{op}: window must be at least 1 (the query's own key), got {window}")
    if not causal:
        raise ValueError(f"{op}: window needs causal=True")


def _check_documents(op: str, q: Tensor, k: Tensor, cu_seqlens: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"{op}: cu_seqlens must be an int32 or int64 tensor, got {got}")
    check_same_device(op, "cu_seqlens", cu_seqlens, "q", q)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{op}: cu_seqlens must have shape [documents + 1] with at least one document, got {list(cu_seqlens.shape)}"
        )
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"{op}: cu_seqlens needs as many queries as keys, got {q.shape[0]} in q and {k.shape[0]} in k")
