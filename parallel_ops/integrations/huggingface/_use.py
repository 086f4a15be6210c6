"""The calls of replaced forwards: those of a module that was changed since go to stock, and all are counted.

Counts lie in the modules, not in what is saved of them. Nothing is counted while torch compiles or runs compiled code.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

is_compiling = torch.compiler.is_dynamo_compiling  # the cheaper of the two, on the path of each call
_CALLS, _KEPT, DEFERRED = "_parallel_ops_calls", "_parallel_ops_kept", "_parallel_ops_deferred"


def watched(
    forward: Callable[..., Any], stock_forward: Callable[..., Any], changed: Callable[[Any], str | None], op: str
) -> Callable[..., Any]:
    """``forward``, which counts its calls; ``stock_forward`` for a module of which ``changed`` returns a change."""

    @functools.wraps(forward)
    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            own = self.__dict__
            own[_CALLS] = own.get(_CALLS, 0) + 1
        reason = changed(self)
        if reason is None:
            return forward(self, *args, **kwargs)
        went_to_stock(self, op, f"was not used: {reason}")
        return stock_forward(self, *args, **kwargs)

    return watching


def went_to_stock(module: nn.Module, op: str, reason: str) -> None:
    """Counts a call of ``module`` in which ``op`` was not used."""
    if not is_compiling():
        kept = module.__dict__.setdefault(_KEPT, {})
        kept[op, reason] = kept.get((op, reason), 0) + 1


def calls(module: nn.Module) -> int:
    return module.__dict__.get(_CALLS, 0)


def calls_of_stock(module: nn.Module) -> dict[tuple[str, str], int]:
    """Calls in which an op was not used, by op and reason."""
    return module.__dict__.get(_KEPT, {})


def forget(module: nn.Module) -> None:
    for name in (_CALLS, _KEPT, DEFERRED):
        module.__dict__.pop(name, None)


def without_uses(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy of a module's attributes without what calls have left there."""
    return {name: value for name, value in attributes.items() if name not in (_CALLS, _KEPT, DEFERRED)}
