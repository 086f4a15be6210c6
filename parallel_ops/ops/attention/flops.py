"""Floating-point operations of attention, by the rule of ``torch.utils.flop_counter``.

Every query is counted with every key, also those that a causal mask or a window hides, so that figures compare with
SDPA's. Documents (``cu_seqlens``) are counted apart, as torch counts sequences of varying length.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def attention_flops(
    q_shape: Sequence[int], keys: int, d_v: int, cu_seqlens: Tensor | None, backward: bool = False
) -> int:
    """Operations of the matmuls, two a multiplication.

    Args:
        q_shape: ``[s, b, h, d]``. keys: tokens of k and v. d_v: size of a head of v.
        cu_seqlens: documents of the tokens of the keys, or ``None``. Lengths of a tensor without values are not known,
            and all pairs are counted.
        backward: count the gradients and the scores, which a backward computes again.
    """
    s, b, h, d = q_shape
    pairs = s * keys
    lengths = None if cu_seqlens is None or cu_seqlens.is_meta else torch.diff(cu_seqlens)
    if lengths is not None and not isinstance(lengths, FakeTensor) and keys:
        pairs = sum(n * n for n in lengths.tolist()) * s // keys
    return 2 * b * h * pairs * (3 * d + 2 * d_v if backward else d + d_v)


def flops(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_seqlens: Tensor | None, *_: Any) -> int:
    return attention_flops(q.shape, k.shape[0], v.shape[3], cu_seqlens)


def flops_of_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: Tensor, sink: Tensor | None,
    cu_seqlens: Tensor | None, *_: Any,
) -> int:  # fmt: skip
    return attention_flops(q.shape, k.shape[0], v.shape[3], cu_seqlens, backward=True)
