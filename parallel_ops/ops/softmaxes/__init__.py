"""Softmax of attention scores, scaled, under a mask or a causal triangle."""

from parallel_ops.ops.softmaxes.scaled_causal_softmax import scaled_causal_softmax, scaled_causal_softmax_reference
from parallel_ops.ops.softmaxes.scaled_masked_softmax import scaled_masked_softmax, scaled_masked_softmax_reference

__all__ = [
    "scaled_causal_softmax",
    "scaled_causal_softmax_reference",
    "scaled_masked_softmax",
    "scaled_masked_softmax_reference",
]
