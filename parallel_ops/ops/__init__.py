"""Fused ops on one device. One file an op: public function, reference twin, autograd, fake, autocast."""

import parallel_ops._internal.dispatch.extension  # noqa: F401  (first: it defines the torch ops that the rest registers with)
from parallel_ops.ops.activations.bias_gelu import bias_gelu, bias_gelu_reference
from parallel_ops.ops.activations.bias_swiglu import bias_swiglu, bias_swiglu_reference
from parallel_ops.ops.activations.gated import gelu_mul, gelu_mul_reference, silu_mul, silu_mul_reference
from parallel_ops.ops.attention.flash_attention import flash_attention, flash_attention_reference
from parallel_ops.ops.bias_dropout_add import bias_dropout_add, bias_dropout_add_reference
from parallel_ops.ops.cross_entropy.cross_entropy import cross_entropy, cross_entropy_reference
from parallel_ops.ops.cross_entropy.kernels import LossStatistics
from parallel_ops.ops.experts.grouped_linear import grouped_linear, grouped_linear_reference
from parallel_ops.ops.experts.order import ExpertOrder, sort_by_expert, sort_by_expert_reference
from parallel_ops.ops.experts.permute import permute, permute_reference, unpermute, unpermute_reference
from parallel_ops.ops.experts.route import Routing, load_balancing_loss, route, route_reference
from parallel_ops.ops.norms.layer_norm import layer_norm, layer_norm_reference
from parallel_ops.ops.norms.rms_norm import rms_norm, rms_norm_reference
from parallel_ops.ops.rotary_embedding import rotary_embedding, rotary_embedding_qk, rotary_embedding_reference
from parallel_ops.ops.softmaxes.scaled_causal_softmax import scaled_causal_softmax, scaled_causal_softmax_reference
from parallel_ops.ops.softmaxes.scaled_masked_softmax import scaled_masked_softmax, scaled_masked_softmax_reference

__all__ = [
    "ExpertOrder",
    "LossStatistics",
    "Routing",
    "bias_dropout_add",
    "bias_dropout_add_reference",
    "bias_gelu",
    "bias_gelu_reference",
    "bias_swiglu",
    "bias_swiglu_reference",
    "cross_entropy",
    "cross_entropy_reference",
    "flash_attention",
    "flash_attention_reference",
    "gelu_mul",
    "gelu_mul_reference",
    "grouped_linear",
    "grouped_linear_reference",
    "layer_norm",
    "layer_norm_reference",
    "load_balancing_loss",
    "permute",
    "permute_reference",
    "rms_norm",
    "rms_norm_reference",
    "rotary_embedding",
    "rotary_embedding_qk",
    "rotary_embedding_reference",
    "route",
    "route_reference",
    "scaled_causal_softmax",
    "scaled_causal_softmax_reference",
    "scaled_masked_softmax",
    "scaled_masked_softmax_reference",
    "silu_mul",
    "silu_mul_reference",
    "sort_by_expert",
    "sort_by_expert_reference",
    "unpermute",
    "unpermute_reference",
]
