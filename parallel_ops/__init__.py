"""Fused kernels and parallel layers for training Megatron-style language models in PyTorch.

The names below are imported at first use, so that the parts that need no torch, such as ``parallel_ops.planner`` and
its command line, start without it. Importing any op loads the compiled extension and registers
``torch.ops.parallel_ops``.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # each from its own file, since the op and its file share a name
    from parallel_ops._internal.gradients.weight_gradients import DeferredWeightGradients
    from parallel_ops.comm import ParallelMesh, PeerError
    from parallel_ops.context_parallel.attention import ring_attention
    from parallel_ops.context_parallel.layouts import SequenceLayout, join_sequence, split_sequence
    from parallel_ops.ops.activations.bias_gelu import bias_gelu
    from parallel_ops.ops.activations.bias_swiglu import bias_swiglu
    from parallel_ops.ops.activations.gated import gelu_mul, silu_mul
    from parallel_ops.ops.attention.flash_attention import flash_attention
    from parallel_ops.ops.bias_dropout_add import bias_dropout_add
    from parallel_ops.ops.cross_entropy.cross_entropy import cross_entropy
    from parallel_ops.ops.cross_entropy.kernels import LossStatistics
    from parallel_ops.ops.experts.grouped_linear import grouped_linear
    from parallel_ops.ops.experts.order import ExpertOrder, sort_by_expert
    from parallel_ops.ops.experts.permute import permute, unpermute
    from parallel_ops.ops.experts.route import Routing, load_balancing_loss, route
    from parallel_ops.ops.float8_grouped_linear import float8_grouped_linear
    from parallel_ops.ops.float8_linear import float8_linear
    from parallel_ops.ops.norms.layer_norm import layer_norm
    from parallel_ops.ops.norms.rms_norm import rms_norm
    from parallel_ops.ops.post_training import dpo_loss, grpo_loss
    from parallel_ops.ops.rotary_embedding import rotary_embedding, rotary_embedding_qk
    from parallel_ops.ops.softmaxes.scaled_causal_softmax import scaled_causal_softmax
    from parallel_ops.ops.softmaxes.scaled_masked_softmax import scaled_masked_softmax
    from parallel_ops.tensor_parallel.linear.all_gather_linear import all_gather_linear
    from parallel_ops.tensor_parallel.linear.column_parallel_linear import column_parallel_linear
    from parallel_ops.tensor_parallel.linear.linear_reduce_scatter import linear_reduce_scatter
    from parallel_ops.tensor_parallel.loss.cross_entropy import vocab_parallel_cross_entropy
    from parallel_ops.tensor_parallel.loss.kl_divergence import (
        linear_kl_divergence,
        vocab_parallel_linear_kl_divergence,
    )
    from parallel_ops.tensor_parallel.loss.linear_cross_entropy import (
        linear_cross_entropy,
        vocab_parallel_linear_cross_entropy,
    )
    from parallel_ops.tensor_parallel.loss.log_probs import LogProbs, linear_log_probs, vocab_parallel_linear_log_probs

__version__ = "0.1.0"

__all__ = [
    "DeferredWeightGradients",
    "ExpertOrder",
    "LogProbs",
    "LossStatistics",
    "ParallelMesh",
    "PeerError",
    "Routing",
    "SequenceLayout",
    "all_gather_linear",
    "bias_dropout_add",
    "bias_gelu",
    "bias_swiglu",
    "column_parallel_linear",
    "cross_entropy",
    "dpo_loss",
    "flash_attention",
    "float8_grouped_linear",
    "float8_linear",
    "gelu_mul",
    "grouped_linear",
    "grpo_loss",
    "join_sequence",
    "layer_norm",
    "linear_cross_entropy",
    "linear_kl_divergence",
    "linear_log_probs",
    "linear_reduce_scatter",
    "load_balancing_loss",
    "permute",
    "ring_attention",
    "rms_norm",
    "rotary_embedding",
    "rotary_embedding_qk",
    "route",
    "scaled_causal_softmax",
    "scaled_masked_softmax",
    "silu_mul",
    "sort_by_expert",
    "split_sequence",
    "unpermute",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_linear_kl_divergence",
    "vocab_parallel_linear_log_probs",
]

# Rooms of the names above, searched in this order: a room comes after those that it imports anyway.
_HOMES = ("ops", "comm", "tensor_parallel", "context_parallel")
_ROOMS = {
    "comm", "context_parallel", "doctor", "expert_parallel", "integrations", "layers", "models", "ops",
    "pipeline_parallel", "planner", "tensor_parallel", "tokenization", "train",
}  # fmt: skip


if not TYPE_CHECKING:  # a type checker would take any name that it could not resolve yet from here

    def __getattr__(name: str) -> object:
        if name in _ROOMS:
            return importlib.import_module(f"parallel_ops.{name}")
        if name not in __all__:
            raise AttributeError(f"module 'parallel_ops' has no attribute {name!r}")
        homes = (importlib.import_module(f"parallel_ops.{home}") for home in _HOMES)
        value = next(getattr(home, name) for home in homes if hasattr(home, name))
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
