"""How evenly the experts of a model were used in a step, and the bias that balances them."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_ops.expert_parallel import update_selection_bias
from parallel_ops.layers import ParallelMoE
from parallel_ops.models import Transformer

# expert_load: the largest load of an expert relative to the mean, in the layer where it is largest.
# expert_entropy: of the loads, relative to equal ones, mean over the layers. expert_dropped: share of choices that a
# capacity dropped.
METRICS = ("expert_load", "expert_entropy", "expert_dropped")


@torch.no_grad()
def expert_use(model: nn.Module, device: torch.device) -> Tensor | None:
    """The values of ``METRICS`` over all ranks, and a step of the trained routers' biases; ``None`` without experts.

    All ranks call it after the backwards of a step; counts begin anew. A model without a capacity drops choices only in
    a step that is taken again, see ``StepGraph``: its biases stay.
    """
    if not isinstance(model, Transformer) or (config := model.config.experts) is None:
        return None
    layers = model.config.all_layers - config.dense_layers
    counts = torch.zeros(layers, config.num_experts + 1, dtype=torch.int64, device=device)
    held: dict[int, ParallelMoE] = {}
    for number, layer in model.layers.items():
        moe = next((module for module in layer.modules() if isinstance(module, ParallelMoE)), None)
        if moe is not None:
            held[int(number) - config.dense_layers] = moe
    for row, moe in held.items():
        if moe.load is not None:
            counts[row, :-1] = moe.load
        if moe.dropped is not None:
            counts[row, -1] = moe.dropped
        moe.reset_counts()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(counts)  # of ranks in other pipeline stages too, whose rows are 0 here
    loads = counts[:, :-1]
    dropped = counts[:, -1].sum() / loads.sum().clamp(min=1)
    rate = config.balance_rate if config.capacity_factor is not None else config.balance_rate * (dropped == 0)
    for row, moe in held.items():
        router = moe.router
        if config.balance_rate and router.selection_bias is not None and router.weight.requires_grad:
            update_selection_bias(router.selection_bias, loads[row], rate)
    total = loads.sum(1, keepdim=True).clamp(min=1).double()
    shares = loads / total
    entropy = -torch.xlogy(shares, shares).sum(1) / math.log(max(2, config.num_experts))
    return torch.stack([shares.max() * config.num_experts, entropy.mean(), dropped])


def overflowed(use: Tensor) -> Tensor:
    """Whether a capacity dropped any choice on any rank, a bool on the device, of what ``expert_use`` returned."""
    return use[METRICS.index("expert_dropped")] > 0
