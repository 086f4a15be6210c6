"""What the layers check before data moves, and how an error of one rank reaches the others."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor

from parallel_ops._internal.checks import check_floating, check_same_device, check_same_dtype
from parallel_ops.comm.consistency import propagate_errors

P = ParamSpec("P")
R = TypeVar("R")


def propagates_errors(forward: Callable[P, R]) -> Callable[P, R]:
    """For the forward of a module over a mesh: what goes wrong in it on one rank is announced to the others.

    The outermost such module does it, at once and without waiting; the others read it in their next collective.
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
    """``x`` is what ``weight``, whose last dimension it shares, can be applied to.

    Args:
        form: of x, for the error, with a place for its last dimension. The number of dimensions counts but for "...".
        parts: over how many ranks the last dimension is split.
    """
    check_floating(layer, "x", x)
    width, dims = weight.shape[-1] // parts, len(form.split(","))
    if x.dim() == 0 or x.shape[-1] != width or ("..." not in form and x.dim() != dims):
        raise ValueError(f"{layer}: x must be {form.format(width)}, got {list(x.shape)}")
    check_same_device(layer, "x", x, "the weight", weight)
    check_same_dtype(layer, "x", x, "the weight", weight)
