"""Argument checks shared by the linears over a group: each raises before data moves and names op and argument."""

from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm._arguments import check_tensor
from parallel_ops.ops._check import check_floating, check_same_device, check_same_dtype


def check_linear(op: str, x: Tensor, weights: list[Tensor], biases: list[Tensor], group: ProcessGroup | None) -> None:
    """Tensors that one product can take, where the group can send them from."""
    check_floating(op, "x", x)
    if x.dim() < 2:
        raise ValueError(f"{op}: x must have at least two dimensions, got {list(x.shape)}")
    check_tensor(op, x, group)
    if not weights:
        raise ValueError(f"{op}: weight must be a tensor or a sequence of at least one")
    for weight in weights:
        check_floating(op, "weight", weight)
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{op}: weight must have shape [N, {x.shape[-1]}], the last dimension of x, got {list(weight.shape)}"
            )
        check_same_device(op, "weight", weight, "x", x)
        check_same_dtype(op, "weight", weight, "x", x)
    if biases and len(biases) != len(weights):
        raise ValueError(f"{op}: bias must be None or one for each of the {len(weights)} weights, got {len(biases)}")
    for weight, bias in zip(weights, biases, strict=False):
        check_floating(op, "bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{op}: bias must have shape [{weight.shape[0]}], one element for each row of weight, "
                f"got {list(bias.shape)}"
            )
        check_same_device(op, "bias", bias, "x", x)
        check_same_dtype(op, "bias", bias, "x", x)
