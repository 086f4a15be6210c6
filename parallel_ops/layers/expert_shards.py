"""Data parallelism of experts that ranks of ``ep`` share: over the ranks that have the same ones."""

import dataclasses
import functools
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from parallel_ops.comm import ParallelMesh
from parallel_ops.layers.experts import Experts


def experts_of(model: nn.Module) -> list[Experts]:
    """The experts of a model that ranks share, layer by layer."""
    return [
        module for module in model.modules() if isinstance(module, Experts) and module.ranks > 1 and not module.copies
    ]


def shard_experts(
    model: nn.Module, mesh: ParallelMesh, *, mp_policy: MixedPrecisionPolicy | None = None, **options: Any
) -> None:
    """Applies ``fully_shard`` to all experts that ranks of ``ep`` share, over the ranks that have the same ones.

    ``fully_shard`` of a layer shards its experts in this way too, with FSDP2's defaults: the ranks of ``ep`` are among
    those that the layer is sharded over. Call this before it in a loop of your own to give them options, such as the
    ``mp_policy`` of the layers. ``parallelize`` calls it.

        mesh = ParallelMesh(dp_shard=4, ep=2)
        model = Transformer(config, expert_mesh=mesh["ep"], device="meta")
        shard_experts(model, mesh)
        for block in (*model.layers.values(), model):
            fully_shard(block, mesh=mesh["fsdp"])

    Gradients of experts become means over ``dp_replicate``, ``dp_shard`` and ``cp``, as those of all others. They are
    on another mesh: ``torch.nn.utils.clip_grad_norm_`` refuses both in one call, so take the norm of each mesh apart.

    Args:
        mp_policy, options: Those of ``fully_shard``. Inputs of experts are never cast: weights of rows are fp32.
    """
    policy = dataclasses.replace(mp_policy or MixedPrecisionPolicy(), cast_forward_inputs=False)
    for experts in experts_of(model):
        placed = functools.partial(_placement, ranks=mesh.size("efsdp"), held=experts.num_experts // mesh.size("ep"))
        fully_shard(experts, mesh=mesh.expert_shards, shard_placement_fn=placed, mp_policy=policy, **options)
        divide(experts, mesh, shards=mesh.size("efsdp"))


def _placement(parameter: nn.Parameter, *, ranks: int, held: int) -> Shard:
    """The dimension of the experts' weights that is sharded: one that divides, experts first."""
    sizes = (held, *parameter.shape[1:])
    return Shard(next((dim for dim, size in enumerate(sizes) if size % ranks == 0), 0))


def divide(experts: nn.Module, mesh: ParallelMesh, *, shards: int) -> None:
    """Makes the gradients of experts means over ``loss``, as those of all other parameters are.

    They are sums over all ranks: each expert gets tokens of all ranks of ``ep``, tensor-parallel ones among them.

    Args:
        shards: ranks over which gradients are reduce-scattered.
    """
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(float(mesh.size("loss")))
    # gloo cannot divide as it reduces. Where nothing is scattered, FSDP2 divides before, and with this a second time.
    if shards > 1 and mesh.root.device_type == "cpu":
        experts.set_force_sum_reduction_for_comms(True)
