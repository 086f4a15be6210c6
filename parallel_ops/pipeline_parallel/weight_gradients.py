"""Which weight gradients a pipeline computes apart from those of the inputs: the matmuls of the model's linears."""

from torch import nn

from parallel_ops.tensor_parallel import DeferredWeightGradients


def defer_weight_gradients(model: nn.Module) -> DeferredWeightGradients | None:
    """Makes the linears of a model leave their weight gradients to a queue, and returns it; ``None`` if there are none.

    A linear is any module with an attribute ``deferred``, as ``ColumnParallelLinear`` and ``RowParallelLinear`` have.
    FSDP2 and ``replicate`` may manage the weights: ``Reduction`` reduces them.
    """
    queue, found = DeferredWeightGradients(fsdp=True), False
    for module in model.modules():
        if hasattr(module, "deferred"):
            module.deferred, found = queue, True  # type: ignore[assignment]
    return queue if found else None
