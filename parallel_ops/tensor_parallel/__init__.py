"""Ops on tensors that are sharded over a process group: linears and cross-entropies."""

from parallel_ops._internal.gradients.weight_gradients import DeferredWeightGradients as DeferredWeightGradients
from parallel_ops.comm import use_transport as use_transport
from parallel_ops.tensor_parallel.linear.all_gather_linear import all_gather_linear as all_gather_linear
from parallel_ops.tensor_parallel.linear.all_gather_linear import (
    all_gather_linear_reference as all_gather_linear_reference,
)
from parallel_ops.tensor_parallel.linear.column_parallel_linear import column_parallel_linear as column_parallel_linear
from parallel_ops.tensor_parallel.linear.column_parallel_linear import (
    column_parallel_linear_reference as column_parallel_linear_reference,
)
from parallel_ops.tensor_parallel.linear.linear_reduce_scatter import linear_reduce_scatter as linear_reduce_scatter
from parallel_ops.tensor_parallel.linear.linear_reduce_scatter import (
    linear_reduce_scatter_reference as linear_reduce_scatter_reference,
)
from parallel_ops.tensor_parallel.loss.cross_entropy import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from parallel_ops.tensor_parallel.loss.kl_divergence import linear_kl_divergence as linear_kl_divergence
from parallel_ops.tensor_parallel.loss.kl_divergence import (
    vocab_parallel_linear_kl_divergence as vocab_parallel_linear_kl_divergence,
)
from parallel_ops.tensor_parallel.loss.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from parallel_ops.tensor_parallel.loss.linear_cross_entropy import (
    vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy,
)
from parallel_ops.tensor_parallel.loss.log_probs import LogProbs as LogProbs
from parallel_ops.tensor_parallel.loss.log_probs import linear_log_probs as linear_log_probs
from parallel_ops.tensor_parallel.loss.log_probs import (
    vocab_parallel_linear_log_probs as vocab_parallel_linear_log_probs,
)
