"""The collectives as one autograd function: the backward of each is another one, so second derivatives work."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel_ops.comm import primitives

# Each takes x, its own arguments, the name of the group, and the name of the call for errors.
_FORWARD: dict[str, Callable[..., Tensor]] = {
    "copy": lambda x, fp32, group, op: x.view_as(x),
    "reduce": primitives.all_reduce,
    "scatter": lambda x, dim, sizes, group, op: primitives.scatter(x, dim, sizes, group),
    "gather": primitives.all_gather,
    "all_gather": lambda x, dim, sizes, fp32, group, op: primitives.all_gather(x, dim, sizes, group, op),
    "reduce_scatter": primitives.reduce_scatter,
    "all_to_all": primitives.all_to_all,
}
# The collective of the backward, which takes the same arguments.
_BACKWARD = {
    "copy": "reduce", "reduce": "copy", "scatter": "gather", "gather": "scatter", "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather", "all_to_all": "all_to_all",
}  # fmt: skip


class Collective(torch.autograd.Function):
    """``Collective.apply(x, name, *arguments, group, op)``: a collective of ``_FORWARD``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, *arguments: Any) -> Tensor:
        ctx.collective, ctx.arguments = name, arguments
        return _FORWARD[name](x, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *own, group, op = ctx.arguments
        if ctx.collective == "all_to_all":  # what was concatenated is split
            own = own[2:] + own[:2]
        back = Collective.apply(grad, _BACKWARD[ctx.collective], *own, group, f"backward of {op}")
        return back, None, *(None for _ in ctx.arguments)
