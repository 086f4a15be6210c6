"""Fused kernels and parallel layers for training Megatron-style language models in PyTorch."""

import parallel_ops._extension  # noqa: F401  (first: it defines the torch ops that the rest registers with)
from parallel_ops.ops import (
    bias_dropout_add,
    bias_gelu,
    bias_swiglu,
    layer_norm,
    rms_norm,
    rotary_embedding,
    scaled_causal_softmax,
    scaled_masked_softmax,
)
from parallel_ops.tensor_parallel import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy

__version__ = "0.1.0"

__all__ = [
    "bias_dropout_add",
    "bias_gelu",
    "bias_swiglu",
    "layer_norm",
    "rms_norm",
    "rotary_embedding",
    "scaled_causal_softmax",
    "scaled_masked_softmax",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
