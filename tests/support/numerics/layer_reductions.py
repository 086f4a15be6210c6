"""What each rank does in the tests of the layers' option ``grad_reduce``."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_ops import layers
from parallel_ops.comm.consistency import set_consistency_checks
from parallel_ops.layers.linear_base import ParallelLinear
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.models.experts import ExpertsConfig
from parallel_ops.models.latent import LatentAttentionConfig
from support.numerics.recorded_calls import recorded_calls
from support.parallelism import layers as on_rank

Calls = tuple[list[str], list[str]]

SHAPE = {"vocab_size": 32, "seq_length": 8, "num_layers": 2, "hidden_size": 16, "num_heads": 4, "dropout": 0.0}
MODELS = {
    "gpt": TransformerConfig(**SHAPE),
    "untied": TransformerConfig(**SHAPE, activation="swiglu", tied_embeddings=False),
    "latent": TransformerConfig(
        **SHAPE, activation="swiglu", positions="rotary", bias=False,
        latent=LatentAttentionConfig(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
        experts=ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=8, shared_experts=1),
    ),
}  # fmt: skip


@contextlib.contextmanager
def compared_once(group: dist.ProcessGroup):
    """Only the first call of a kind is compared between the ranks, which takes messages of its own."""
    set_consistency_checks(group, "first")
    try:
        yield
    finally:
        set_consistency_checks(group, "always")


def calls_of_steps(module: nn.Module, x: Tensor) -> Calls:
    """The collectives of a forward and of its backward, after a first step."""
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        with recorded_calls() as forward:
            y = module(leaf)
        y = y[0] if isinstance(y, tuple) else y  # Megatron's: (output, bias)
        with recorded_calls() as backward:
            y.sum().backward()
    return forward, backward


def calls_of_linear(rank: int, kind: str, sequence_parallel: bool, grad_reduce: str) -> Calls:
    """Of ``layers.ColumnParallelLinear`` or ``layers.RowParallelLinear``."""
    module = on_rank.build(kind, sequence_parallel=sequence_parallel, grad_reduce=grad_reduce, bias=False)
    width = on_rank.HIDDEN // (dist.get_world_size() if kind == "row" else 1)
    with compared_once(module.group):
        return calls_of_steps(module, torch.ones(4, 2, width))


def calls_of_layer(rank: int, kind: str, sequence_parallel: bool, grad_reduce: str) -> set[str]:
    module = on_rank.build(kind, sequence_parallel=sequence_parallel, grad_reduce=grad_reduce)
    with compared_once(module.group):
        forward, backward = calls_of_steps(module, torch.ones(256, 2, on_rank.HIDDEN))
    return {*forward, *backward}


def train(rank: int, kind: str, sequence_parallel: bool, **options: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss, logits, whole gradients of the parameters) of a model in float64."""
    torch.manual_seed(0)
    model = Transformer(
        MODELS[kind], tp_mesh=on_rank.tp_mesh(), sequence_parallel=sequence_parallel, dtype=torch.float64, **options
    ).eval()  # without auxiliary losses, which have the exact sum
    tokens, targets = torch.randint(32, (2, 8, 3), generator=torch.Generator().manual_seed(1))
    loss = model(tokens, targets)
    logits = model(tokens)
    (loss + logits.square().mean()).backward()
    return loss.detach(), logits.detach(), {name: on_rank.whole(p.grad) for name, p in model.named_parameters()}


def train_with(rank: int, kind: str, sequence_parallel: bool, grad_reduce: str):
    return train(rank, kind, sequence_parallel, grad_reduce=grad_reduce)


def reductions(module: nn.Module) -> list[str]:
    """Of all linears over a mesh in a module."""
    return [linear.grad_reduce for linear in module.modules() if isinstance(linear, ParallelLinear)]


def of_moe(grad_reduce: str) -> nn.Module:
    return layers.ParallelMoE(16, 8, 4, 2, tp_mesh=None, shared_experts=1, grad_reduce=grad_reduce)
