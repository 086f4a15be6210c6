"""Checks of layers before communication starts, and propagation of a rank's errors."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_floating, check_same_device, check_same_dtype
from parallel_ops.comm.consistency import propagate_errors

P = ParamSpec("P")
R = TypeVar("R")


def propagates_errors(forward: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a module's forward: an exception on one rank is published to the other ranks of its group.

    Only the outermost decorated module publishes, without waiting. Other ranks raise in their next collective.
    """

    @functools.wraps(forward)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        module = args[0]
        if module.group is None:  # type: ignore[attr-defined]
            return forward(*args, **kwargs)
        name = type(module).__name__
        with propagate_errors(name, module.group, *args[1:], *kwargs.values()):  # type: ignore[attr-defined]
            return forward(*args, **kwargs)

    return call


def check_input(layer: str, x: Tensor, weight: Tensor, form: str = "[s, ..., {}]", *, parts: int = 1) -> None:
    """Raises unless ``weight`` can be applied to the last dimension of ``x``.

    Args:
        form: shape of x in the error, ``{}`` for its last dimension. Without "..." x must have that many dimensions.
        parts: number of ranks over which the last dimension of x is sharded.
    """
    check_floating(layer, "x", x)
    width, dims = weight.shape[-1] // parts, len(form.split(","))
    if x.dim() == 0 or x.shape[-1] != width or ("..." not in form and x.dim() != dims):
        raise ValueError(f"{layer}: x must be {form.format(width)}, got {list(x.shape)}")
    check_same_device(layer, "x", x, "the weight", weight)
    check_same_dtype(layer, "x", x, "the weight", weight)
