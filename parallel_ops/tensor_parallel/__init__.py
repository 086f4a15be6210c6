"""Ops whose tensors are sharded over a process group."""

from parallel_ops.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from parallel_ops.tensor_parallel.linear_cross_entropy import vocab_parallel_linear_cross_entropy

__all__ = ["vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"]
