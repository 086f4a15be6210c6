"""Fused kernels and parallel layers for training Megatron-style language models in PyTorch."""

import parallel_ops._extension  # noqa: F401  (first: it defines the torch ops that the rest registers with)
from parallel_ops.ops import bias_dropout_add, bias_gelu, bias_swiglu, scaled_causal_softmax, scaled_masked_softmax

__version__ = "0.1.0"

__all__ = ["bias_dropout_add", "bias_gelu", "bias_swiglu", "scaled_causal_softmax", "scaled_masked_softmax"]
