"""Fused ops on one device. One file an op: public function, reference twin, autograd, fake, autocast."""

from parallel_ops.ops.bias_dropout_add import bias_dropout_add, bias_dropout_add_reference
from parallel_ops.ops.bias_gelu import bias_gelu, bias_gelu_reference
from parallel_ops.ops.bias_swiglu import bias_swiglu, bias_swiglu_reference

__all__ = [
    "bias_dropout_add",
    "bias_dropout_add_reference",
    "bias_gelu",
    "bias_gelu_reference",
    "bias_swiglu",
    "bias_swiglu_reference",
]
