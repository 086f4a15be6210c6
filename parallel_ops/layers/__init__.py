"""Modules whose parameters are sharded over a tensor-parallel mesh, for your own models."""

from parallel_ops.layers import core_attention as core_attention
from parallel_ops.layers.attention import ParallelSelfAttention
from parallel_ops.layers.embedding import VocabParallelEmbedding
from parallel_ops.layers.latent_attention import ParallelLatentAttention
from parallel_ops.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel_ops.layers.mlp import ParallelMLP
from parallel_ops.layers.moe import ParallelMoE
from parallel_ops.layers.norm import Norm
from parallel_ops.layers.transformer import ParallelTransformerLayer

__all__ = [
    "ColumnParallelLinear",
    "Norm",
    "ParallelLatentAttention",
    "ParallelMLP",
    "ParallelMoE",
    "ParallelSelfAttention",
    "ParallelTransformerLayer",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "core_attention",
]
