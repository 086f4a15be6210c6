"""The layers of a transformer, built from its configuration."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parallel_ops._internal.distributed.groups import GradReduce
from parallel_ops.layers import ParallelLatentAttention, ParallelMoE, ParallelTransformerLayer
from parallel_ops.layers.core_attention import CoreAttention
from parallel_ops.models.config import TransformerConfig
from parallel_ops.models.prediction import PredictionLayer
from parallel_ops.models.rotary_scaling import YarnScaling
from parallel_ops.tensor_parallel.linear.call import Overlap

# Fields of ``ExpertsConfig`` that are not arguments of ``ParallelMoE``.
_OF_THE_MODEL = ("dense_layers", "balance_rate", "aux_loss", "z_loss", "aux_loss_over")


def layer_of(
    config: TransformerConfig, number: int, *, core_attention: CoreAttention | None, overlap: Overlap,
    grad_reduce: GradReduce, ep_mesh: DeviceMesh | None, cp_group: ProcessGroup | None, **common: Any,
) -> ParallelTransformerLayer:  # fmt: skip
    """Layer ``number`` of a model, counted from 0; from ``num_layers`` on those that predict further tokens.

    Args:
        ep_mesh: see ``ParallelMoE``. cp_group: the ranks that share each sequence.
        common: ``tp_mesh``, ``sequence_parallel``, device and dtype.
    """
    # Smaller for projections into the residual stream, so that its sum keeps its scale (GPT-2).
    init: dict[str, Any] = {
        "overlap": overlap,
        "grad_reduce": grad_reduce,
        "init_method": normal(config.init_std),
        "output_init_method": normal(config.init_std / math.sqrt(2 * config.num_layers)),
    }
    attention: ParallelLatentAttention | None = None
    if (latent := config.latent) is not None:
        scale, scaling = None, config.rotary_scaling
        if isinstance(scaling, YarnScaling):
            scale = (latent.qk_nope_head_dim + latent.qk_rope_head_dim) ** -0.5 * scaling.softmax_factor
        attention = ParallelLatentAttention(
            config.hidden_size, config.num_heads, **dataclasses.asdict(latent), window_size=config.window_size(number),
            scale=scale, core_attention=core_attention, attention_dropout=config.attention_dropout, **init, **common,
        )  # fmt: skip
    mlp: ParallelMoE | None = None
    if config.experts is not None and config.has_experts(number):
        given = dataclasses.asdict(config.experts)
        options = {name: value for name, value in given.items() if name not in _OF_THE_MODEL}
        mlp = ParallelMoE(config.hidden_size, **options, ep_mesh=ep_mesh, cp_group=cp_group, **init, **common)
    kind = PredictionLayer if number >= config.num_layers else ParallelTransformerLayer
    return kind(
        config.hidden_size,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn_hidden_size=config.resolved_ffn_hidden_size,
        activation=config.activation,
        attention=attention,
        mlp=mlp,
        norm=config.norm,
        norm_eps=config.norm_eps,
        qk_norm=config.qk_norm,
        qk_norm_over=config.qk_norm_over,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        bias=config.bias,
        attention_bias=config.attention_bias,
        qkv_bias=config.qkv_bias,
        sink=config.attention_sinks,
        window_size=config.window_size(number),
        core_attention=core_attention,
        **init,
        **common,
    )


def normal(std: float) -> Callable[[Tensor], Tensor]:
    """Fills tensors with a normal distribution of mean 0."""
    return functools.partial(nn.init.normal_, std=std)
