"""A backward in two halves, as zero-bubble pipeline schedules run it (torch.distributed.pipelining).

The input half computes the gradients of a stage's inputs; the weight half computes those of its parameters, later. Both
run the same autograd nodes, the second time only those that feed a parameter. Between the halves FSDP2 may free the
gathered parameters: a tensor that autograd saved of one then has no memory. So a backward computes only what the
running half returns (``requested``), and the input half copies the values of a parameter that the weight half reads
(``kept_parameter``).
"""

from typing import Any

import torch
from torch import Tensor

_runs = torch._C._will_engine_execute_node


def runs(node: Any) -> bool:
    """Whether the running backward computes the gradient that goes to ``node``."""
    try:
        return _runs(node)
    except RuntimeError:  # raised for a leaf whose gradient autograd.grad returns
        return True


def requested(ctx: Any) -> list[bool]:
    """Which arguments of a function get a gradient from the running backward.

    ``ctx.needs_input_grad`` is fixed in the forward: it holds all that some backward may compute.
    """
    needed = list(ctx.needs_input_grad)
    argument = -1
    for node, _ in ctx.next_functions:
        if node is not None:
            argument = needed.index(True, argument + 1)
            needed[argument] = runs(node)
    return needed


def kept_parameter(ctx: Any, op: str, name: str, saved: Tensor | None, argument: int, now: list[bool]) -> Tensor | None:
    """A small parameter, such as a bias, whose value its own gradient needs: the input half copies it for the other.

    Args:
        saved: what autograd saved of it. argument: its number among the function's arguments, the input's being 0.
        now: what ``requested`` returned.

    Raises:
        RuntimeError: its memory was freed, and no input half ran before.
    """
    if saved is None or not ctx.needs_input_grad[argument]:
        return saved
    copy: Tensor | None = getattr(ctx, "parameter_copy", None)
    if not now[argument]:
        ctx.parameter_copy = saved.clone() if copy is None else copy
        return saved
    if copy is None and not now[0]:
        check_memory(op, name, saved)
    return saved if copy is None else copy


def check_memory(op: str, name: str, t: Tensor) -> None:
    """Raises RuntimeError where the memory of ``t`` was freed: kernels of GPUs would fault, and end the process."""
    if type(t) in (Tensor, torch.nn.Parameter) and t.numel() and t.untyped_storage().nbytes() == 0:
        raise RuntimeError(
            f"{op}: the memory of {name} was freed before its gradient was computed, as FSDP2 frees parameters when it "
            "reshards them; unshard the module before the weight half of its backward"
        )
