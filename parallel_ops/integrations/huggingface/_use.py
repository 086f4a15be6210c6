"""Counts the calls of replaced forwards, and those in which one went back to stock, for ``print(applied)``.

Counts lie in the modules, not in what is saved of them. Nothing is counted while torch compiles or runs compiled code.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_is_compiling = torch.compiler.is_dynamo_compiling  # the cheaper of the two, on the path of each call
_CALLS, _KEPT = "_parallel_ops_calls", "_parallel_ops_kept"


def counted(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, which counts its calls."""

    @functools.wraps(forward)
    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_compiling():
            own = self.__dict__
            own[_CALLS] = own.get(_CALLS, 0) + 1
        return forward(self, *args, **kwargs)

    return counting


def went_to_stock(module: nn.Module, op: str, reason: str) -> None:
    """Counts a call of ``module`` in which ``op`` was not used."""
    if not _is_compiling():
        kept = module.__dict__.setdefault(_KEPT, {})
        kept[op, reason] = kept.get((op, reason), 0) + 1


def calls(module: nn.Module) -> int:
    return module.__dict__.get(_CALLS, 0)


def calls_of_stock(module: nn.Module) -> dict[tuple[str, str], int]:
    """Calls in which an op was not used, by op and reason."""
    return module.__dict__.get(_KEPT, {})


def forget(module: nn.Module) -> None:
    for name in (_CALLS, _KEPT):
        module.__dict__.pop(name, None)


def without_uses(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy of a module's attributes without the counts."""
    return {name: value for name, value in attributes.items() if name not in (_CALLS, _KEPT)}
