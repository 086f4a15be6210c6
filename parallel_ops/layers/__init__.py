"""Modules whose parameters are shared by the ranks of a mesh, for models of the user's own."""

from parallel_ops.layers import core_attention as core_attention
from parallel_ops.layers.attention import ParallelSelfAttention
from parallel_ops.layers.embedding import VocabParallelEmbedding
from parallel_ops.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel_ops.layers.mlp import ParallelMLP
from parallel_ops.layers.norm import Norm
from parallel_ops.layers.transformer import ParallelTransformerLayer

__all__ = [
    "ColumnParallelLinear",
    "Norm",
    "ParallelMLP",
    "ParallelSelfAttention",
    "ParallelTransformerLayer",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "core_attention",
]
