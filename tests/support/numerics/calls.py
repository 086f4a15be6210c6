"""Calls of public functions of one device, with inputs that require gradients."""

import torch

from parallel_ops import (
    bias_dropout_add,
    bias_gelu,
    bias_swiglu,
    flash_attention,
    gelu_mul,
    layer_norm,
    permute,
    rms_norm,
    rotary_embedding_qk,
    route,
    scaled_masked_softmax,
    silu_mul,
    sort_by_expert,
    unpermute,
    vocab_parallel_cross_entropy,
)
from support.numerics.suite import angles, randn

X, BIAS = randn(6, 8, dtype=torch.float32), randn(8, dtype=torch.float32, seed=1)
TARGET = torch.arange(6)
HEADS = randn(6, 2, 8, dtype=torch.float32)


def _differentiable(routing):
    return routing.weights, routing.score_sums, routing.z_sum


CALLS = {
    "bias_gelu": (bias_gelu, (X, BIAS)),
    "bias_gelu without a bias": (bias_gelu, (X,)),
    "bias_dropout_add": (lambda *args: bias_dropout_add(*args, 0.5, dropout_seed=3), (X, BIAS, X * 2)),
    "layer_norm": (lambda x, w, b, r: layer_norm(x, w, b, residual=r), (X, BIAS, BIAS * 3, X * 2)),
    "rms_norm": (rms_norm, (X, BIAS)),
    "bias_swiglu": (lambda x, b, w: bias_swiglu(x, b, weights=w), (X, BIAS, X[:, 0] * 2)),
    "silu_mul": (silu_mul, (X, X * 2)),
    "gelu_mul": (gelu_mul, (X, X * 2)),
    "rotary_embedding_qk": (lambda q, k: rotary_embedding_qk(q, k, *angles(6, 4)), (HEADS, HEADS * 2)),
    "scaled_masked_softmax": (scaled_masked_softmax, (X, BIAS)),
    "flash_attention": (
        lambda q, k: flash_attention(q, k, k * 2, window_size=(2, 0)),
        (HEADS[:, None], HEADS[:, None] * 2),
    ),
    "vocab_parallel_cross_entropy": (vocab_parallel_cross_entropy, (X, TARGET)),
}
ORDER = sort_by_expert(torch.tensor([[0, 2], [1, 2], [-1, 0]]), 3, capacity=2)
CALLS |= {
    "route": (
        lambda x: _differentiable(route(x, 3, bias=BIAS.detach(), score="sigmoid", groups=4, top_groups=2)),
        (X,),
    ),
    "permute": (lambda x: permute(x, ORDER), (X[:3],)),
    "unpermute": (lambda y, w: unpermute(y, ORDER, w), (X, X[:3, :2] * 2)),
}
