"""The ops that a model calls, as one value: the fused ones, or plain PyTorch written as users write it.

``FUSED`` and ``PLAIN`` take the same arguments and mean the same, so a model built with one and a model built with
the other have the same parameters, the same state dict and, but for rounding, the same loss and gradients. Dropout is
the exception: both drop with the same probability, but draw their own masks.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_ops import ops
from parallel_ops.tensor_parallel import vocab_parallel_linear_cross_entropy


@dataclass(frozen=True, kw_only=True)
class Ops:
    """The ops between a model's matrix products, and the loss.

    Attributes:
        bias_gelu: ``(x, bias)``.
        bias_swiglu: ``(x, bias)``, ``[..., 2F] -> [..., F]``, gate half first.
        bias_dropout_add: ``(x, bias, residual, p, training=...)``.
        scaled_causal_softmax: ``(scores, scale)``, scores ``[b, np, sq, sk]``.
        layer_norm: ``(x, weight, bias, eps)``.
        rms_norm: ``(x, weight, eps)``.
        rotary_embedding: ``(x, cos, sin)``, ``[s, b, np, d]`` and fp32 angles ``[s, d / 2]``.
        linear_cross_entropy: ``(hidden, weight, targets)``, ``[..., h]``, ``[vocabulary, h]`` and ``[...]``; the mean.
    """

    bias_gelu: Callable[[Tensor, Tensor], Tensor]
    bias_swiglu: Callable[[Tensor, Tensor], Tensor]
    bias_dropout_add: Callable[..., Tensor]
    scaled_causal_softmax: Callable[[Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotary_embedding: Callable[[Tensor, Tensor, Tensor], Tensor]
    linear_cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor]


def _plain_bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def _plain_bias_swiglu(x: Tensor, bias: Tensor) -> Tensor:
    gate, up = (x + bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def _plain_bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, p: float, *, training: bool = True) -> Tensor:
    return residual + F.dropout(x + bias, p, training)


@functools.lru_cache(maxsize=8)
def _future(sq: int, sk: int, device: torch.device) -> Tensor:
    """True where a query may not look. Kept between calls, as models keep it in a buffer."""
    return torch.ones(sq, sk, dtype=torch.bool, device=device).triu(sk - sq + 1)


def _plain_scaled_causal_softmax(scores: Tensor, scale: float = 1.0) -> Tensor:
    future = _future(scores.shape[-2], scores.shape[-1], scores.device)
    return torch.softmax((scores * scale).masked_fill(future, -torch.inf), dim=-1)


def _plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _plain_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten())


FUSED = Ops(
    bias_gelu=ops.bias_gelu,
    bias_swiglu=ops.bias_swiglu,
    bias_dropout_add=ops.bias_dropout_add,
    scaled_causal_softmax=ops.scaled_causal_softmax,
    layer_norm=ops.layer_norm,
    rms_norm=ops.rms_norm,
    rotary_embedding=ops.rotary_embedding,
    linear_cross_entropy=vocab_parallel_linear_cross_entropy,
)

PLAIN = Ops(
    bias_gelu=_plain_bias_gelu,
    bias_swiglu=_plain_bias_swiglu,
    bias_dropout_add=_plain_bias_dropout_add,
    scaled_causal_softmax=_plain_scaled_causal_softmax,
    layer_norm=_plain_layer_norm,
    rms_norm=_plain_rms_norm,
    rotary_embedding=ops.rotary_embedding_reference,
    linear_cross_entropy=_plain_linear_cross_entropy,
)
