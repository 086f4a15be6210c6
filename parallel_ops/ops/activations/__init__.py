"""GeLU, SwiGLU and their gated relatives, fused with a bias or a second factor."""

from parallel_ops.ops.activations.bias_gelu import bias_gelu, bias_gelu_reference
from parallel_ops.ops.activations.bias_swiglu import bias_swiglu, bias_swiglu_reference
from parallel_ops.ops.activations.gated import gelu_mul, gelu_mul_reference, silu_mul, silu_mul_reference

__all__ = [
    "bias_gelu",
    "bias_gelu_reference",
    "bias_swiglu",
    "bias_swiglu_reference",
    "gelu_mul",
    "gelu_mul_reference",
    "silu_mul",
    "silu_mul_reference",
]
