"""Ops on tensors that are sharded over a process group: linears and cross-entropies."""

from parallel_ops._internal.gradients.weight_gradients import DeferredWeightGradients
from parallel_ops.comm import use_transport
from parallel_ops.tensor_parallel.linear.all_gather_linear import all_gather_linear, all_gather_linear_reference
from parallel_ops.tensor_parallel.linear.column_parallel_linear import (
    column_parallel_linear,
    column_parallel_linear_reference,
)
from parallel_ops.tensor_parallel.linear.linear_reduce_scatter import (
    linear_reduce_scatter,
    linear_reduce_scatter_reference,
)
from parallel_ops.tensor_parallel.loss.cross_entropy import vocab_parallel_cross_entropy
from parallel_ops.tensor_parallel.loss.linear_cross_entropy import vocab_parallel_linear_cross_entropy

__all__ = [
    "DeferredWeightGradients",
    "all_gather_linear",
    "all_gather_linear_reference",
    "column_parallel_linear",
    "column_parallel_linear_reference",
    "linear_reduce_scatter",
    "linear_reduce_scatter_reference",
    "use_transport",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
