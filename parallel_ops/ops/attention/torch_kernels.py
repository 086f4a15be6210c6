"""Attention by torch's kernels and flash-attn-4's, in this package's layout and with the logsumexp of each query.

    L[i] = log sum_j exp(scale q[i] . k[j])        natural logarithm, over the keys j that i sees

With M = L and Z = 1 it is a result like those of ``block.py``, so blocks of either are merged into one. The backward
takes the final output and L, after all merges, and finds D = dO . O by itself.

The ops below ``scaled_dot_product_attention`` are called, since that does not return L.
"""

import functools

import torch
from torch import Tensor

from parallel_ops.ops.attention import fa4
from parallel_ops.ops.attention.options import AttentionOptions

_aten = torch.ops.aten


def forward(backend: str, options: AttentionOptions, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The attention ``[sq, b, heads, d_v]`` in the dtype of ``q``, and L ``[b, heads, sq]`` in fp32 (fp64 for fp64).

    Args:
        backend: ``"fa4"``, ``"flash"`` or ``"cudnn"``. options: causal or full, with a window or documents where it
            takes them.
        q: ``[sq, b, heads, d]``; k: ``[sk, b, kv_heads, d]``; v: ``[sk, b, kv_heads, d_v]``.
    """
    if backend == "fa4":
        return fa4.forward(options, q, k, v)
    if backend == "cudnn" or q.is_cpu:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        if q.is_cpu:
            out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, options.causal, scale=options.softmax_scale
            )
        else:
            out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, options.causal, False, scale=options.softmax_scale
            )
        return out.permute(2, 0, 1, 3), lse.reshape(q.shape[:3])
    q, k, v, bounds, keywords = _flash_arguments(options, q, k, v)
    out, lse, *_ = _aten._flash_attention_forward(q, k, v, *bounds, 0.0, options.causal, False, **keywords)
    if options.cu_seqlens is not None:
        return out.unsqueeze(1), lse.unsqueeze(0)
    return out.transpose(0, 1), lse


def backward(
    backend: str, options: AttentionOptions, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in the dtype of ``q``.

    Args:
        out, lse: the final ones of these queries, of all keys and the sink; ``out`` in the dtype of ``q``.
    """
    lse = lse.contiguous()
    if backend == "fa4":
        return fa4.backward(options, grad, q, k, v, out, lse)
    if backend == "cudnn" or q.is_cpu:
        grad, q, k, v, out = (t.permute(1, 2, 0, 3) for t in (grad, q, k, v, out))
        if q.is_cpu:
            gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, options.causal, scale=options.softmax_scale
            )
        else:
            lse = lse.unsqueeze(3) if _cudnn_dims() == 4 else lse
            unused, none = q.new_empty((), dtype=torch.int64), None
            gradients = _aten._scaled_dot_product_cudnn_attention_backward(
                grad, q, k, v, out, lse, unused, unused, none, none, none, q.shape[2], k.shape[2], 0.0, options.causal,
                scale=options.softmax_scale,
            )  # fmt: skip
        dq, dk, dv = (t.permute(2, 0, 1, 3) for t in gradients)
        return dq, dk, dv
    q, k, v, bounds, keywords = _flash_arguments(options, q, k, v)
    grad, out = (t.squeeze(1) if options.cu_seqlens is not None else t.transpose(0, 1) for t in (grad, out))
    lse = lse.squeeze(0) if options.cu_seqlens is not None else lse
    seed, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)  # read with dropout only
    gradients = _aten._flash_attention_backward(
        grad, q, k, v, out, lse, *bounds, 0.0, options.causal, seed, unused, **keywords
    )
    dq, dk, dv = (t.unsqueeze(1) if options.cu_seqlens is not None else t.transpose(0, 1) for t in gradients)
    return dq, dk, dv


def _flash_arguments(
    options: AttentionOptions, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, Tensor | None, int, int], dict[str, float | int | None]]:
    """q, k and v in flash attention's layout, bounds of documents with their greatest lengths, and the keywords."""
    keywords: dict[str, float | int | None] = {"scale": options.softmax_scale}
    if options.left is not None:
        keywords |= {"window_size_left": options.left, "window_size_right": options.right}
    lengths = q.shape[0], k.shape[0]
    if options.cu_seqlens is None:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        return q, k, v, (None, None, *lengths), keywords
    # The host does not know the longest document: no document is longer than all of them.
    q, k, v = (t.squeeze(1) for t in (q, k, v))
    bounds = options.cu_seqlens.to(torch.int32)
    return q, k, v, (bounds, bounds, *lengths), keywords


@functools.cache
def _cudnn_dims() -> int:
    """Dimensions of L as this torch's cuDNN attention returns and takes it: ``[b, h, s, 1]``, in some ``[b, h, s]``."""
    q = torch.empty((1, 1, 8, 8), dtype=torch.float16, device="meta")
    lse: Tensor = _aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.0, False, False, scale=1.0)[1]
    return lse.dim()
