"""Fused ops on one device. One file an op: public function, reference twin, outputs, launch, autograd, autocast."""

import parallel_ops._internal.dispatch.extension  # noqa: F401  (first: it defines the torch ops that the rest registers with)
from parallel_ops.ops.activations.bias_gelu import bias_gelu as bias_gelu
from parallel_ops.ops.activations.bias_gelu import bias_gelu_reference as bias_gelu_reference
from parallel_ops.ops.activations.bias_swiglu import bias_swiglu as bias_swiglu
from parallel_ops.ops.activations.bias_swiglu import bias_swiglu_reference as bias_swiglu_reference
from parallel_ops.ops.activations.gated import gelu_mul as gelu_mul
from parallel_ops.ops.activations.gated import gelu_mul_reference as gelu_mul_reference
from parallel_ops.ops.activations.gated import silu_mul as silu_mul
from parallel_ops.ops.activations.gated import silu_mul_reference as silu_mul_reference
from parallel_ops.ops.attention.flash_attention import flash_attention as flash_attention
from parallel_ops.ops.attention.reference import flash_attention_reference as flash_attention_reference
from parallel_ops.ops.bias_dropout_add import bias_dropout_add as bias_dropout_add
from parallel_ops.ops.bias_dropout_add import bias_dropout_add_reference as bias_dropout_add_reference
from parallel_ops.ops.cross_entropy.cross_entropy import cross_entropy as cross_entropy
from parallel_ops.ops.cross_entropy.cross_entropy import cross_entropy_reference as cross_entropy_reference
from parallel_ops.ops.cross_entropy.kernels import LossStatistics as LossStatistics
from parallel_ops.ops.experts.grouped_linear import grouped_linear as grouped_linear
from parallel_ops.ops.experts.grouped_linear import grouped_linear_reference as grouped_linear_reference
from parallel_ops.ops.experts.order import ExpertOrder as ExpertOrder
from parallel_ops.ops.experts.order import sort_by_expert as sort_by_expert
from parallel_ops.ops.experts.order import sort_by_expert_reference as sort_by_expert_reference
from parallel_ops.ops.experts.permute import permute as permute
from parallel_ops.ops.experts.permute import permute_reference as permute_reference
from parallel_ops.ops.experts.permute import unpermute as unpermute
from parallel_ops.ops.experts.permute import unpermute_reference as unpermute_reference
from parallel_ops.ops.experts.route import Routing as Routing
from parallel_ops.ops.experts.route import load_balancing_loss as load_balancing_loss
from parallel_ops.ops.experts.route import route as route
from parallel_ops.ops.experts.route import route_reference as route_reference
from parallel_ops.ops.float8_grouped_linear import float8_grouped_linear as float8_grouped_linear
from parallel_ops.ops.float8_linear import float8_linear as float8_linear
from parallel_ops.ops.norms.layer_norm import layer_norm as layer_norm
from parallel_ops.ops.norms.layer_norm import layer_norm_reference as layer_norm_reference
from parallel_ops.ops.norms.rms_norm import rms_norm as rms_norm
from parallel_ops.ops.norms.rms_norm import rms_norm_reference as rms_norm_reference
from parallel_ops.ops.post_training import dpo_loss as dpo_loss
from parallel_ops.ops.post_training import grpo_loss as grpo_loss
from parallel_ops.ops.rotary_embedding import rotary_embedding as rotary_embedding
from parallel_ops.ops.rotary_embedding import rotary_embedding_qk as rotary_embedding_qk
from parallel_ops.ops.rotary_embedding import rotary_embedding_reference as rotary_embedding_reference
from parallel_ops.ops.softmaxes.scaled_causal_softmax import scaled_causal_softmax as scaled_causal_softmax
from parallel_ops.ops.softmaxes.scaled_causal_softmax import (
    scaled_causal_softmax_reference as scaled_causal_softmax_reference,
)
from parallel_ops.ops.softmaxes.scaled_masked_softmax import scaled_masked_softmax as scaled_masked_softmax
from parallel_ops.ops.softmaxes.scaled_masked_softmax import (
    scaled_masked_softmax_reference as scaled_masked_softmax_reference,
)
