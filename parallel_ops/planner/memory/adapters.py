"""Low-rank adapters that are trained alone: parameters, and bytes of the weights that stay frozen.

An adapter of rank r adds x A B to a linear of [n, m], with A [n, r] and B [r, m] (LoRA, arXiv:2106.09685). Every linear
of the layers has one, but for routers and routed experts. The backward pass computes no gradients of frozen weights,
so these are neither accumulated nor reduced, and have no optimizer state. ``nf4`` keeps the frozen linears of layers in
4 bits (QLoRA, arXiv:2305.14314): they are converted to 16 bits for each matmul.
"""

from parallel_ops.planner.compute.linears import linear_shapes
from parallel_ops.planner.model import Model


def layer_adapters(model: Model, sparse: bool, tp: int) -> float:
    """Parameters of the adapters of one layer on one of ``tp`` ranks."""
    shapes = linear_shapes(model, tp, 1.0, sparse=sparse)
    sides = (count * (inputs + outputs) for _, inputs, outputs, count in shapes if outputs != model.experts)
    return model.lora_rank * sum(sides)


def saved_parameters(model: Model) -> float:
    """Parameters that a checkpoint has with their optimizer state."""
    if not model.lora_rank:
        return model.parameters
    return sum(n * layer_adapters(*kind, 1) for n, kind in zip(model.kind_counts, model.kinds, strict=True))
