"""Modules whose parameters and activations are sharded over a group of ranks, for models of the user's own."""

from parallel_ops.layers._sharding import Sharding, sharded_parameters
from parallel_ops.layers.attention import ParallelSelfAttention
from parallel_ops.layers.embedding import VocabParallelEmbedding
from parallel_ops.layers.gradients import clip_grad_norm
from parallel_ops.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel_ops.layers.mlp import ParallelMLP
from parallel_ops.layers.optimizer_state import load_optimizer_state_dict, optimizer_state_dict
from parallel_ops.layers.transformer import Norm, ParallelTransformerLayer, whole_gradients

__all__ = [
    "ColumnParallelLinear",
    "Norm",
    "ParallelMLP",
    "ParallelSelfAttention",
    "ParallelTransformerLayer",
    "RowParallelLinear",
    "Sharding",
    "VocabParallelEmbedding",
    "clip_grad_norm",
    "load_optimizer_state_dict",
    "optimizer_state_dict",
    "sharded_parameters",
    "whole_gradients",
]
