"""How a module gets another forward and stays what it is.

Its class becomes a subclass of its class that has another forward and the same name. So its parameters, buffers, hooks
and children are the same objects under the same names, ``isinstance`` and what goes by class names (FSDP's wrapping,
Transformers' layer lists, ``config.architectures``) find what they look for, and going back is to give it back its
class. Weights are read only in the forward of the module that holds them: sharding, offloading and adapters that work
by hooks on modules or by wrapping them see what they would see without.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

# What a recipe makes of a class: its new attributes, ``forward`` among them.
Recipe = Callable[..., dict[str, Any]]

_MARK = "_parallel_ops_stock"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@functools.cache
def fused_class(stock: Any, recipe: Recipe, *options: Any) -> type[nn.Module]:
    """The subclass of the module class ``stock`` that ``recipe(stock, *options)`` describes."""

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return _new, (stock, recipe, *options), self.__dict__.copy()

    attributes = {
        "__module__": stock.__module__,  # Transformers reads the source of a model's module
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "__reduce_ex__": reduce,
        _MARK: stock,
        **recipe(stock, *options),
    }
    return type(stock.__name__, (stock,), attributes)


def _new(stock: Any, *recipe: Any) -> nn.Module:
    cls = fused_class(stock, *recipe)
    return cls.__new__(cls)


def stock_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that ``module`` had before it got a fused one; ``None`` if it has none."""
    return getattr(type(module), _MARK, None)


def obstacle(module: nn.Module, stock: type[nn.Module], unused: tuple[nn.Module, ...] = ()) -> str | None:
    """Why ``module``, a ``stock``, cannot get another forward that does not call the modules ``unused``."""
    if "forward" in module.__dict__:
        return "something else has replaced its forward"
    if inspect.unwrap(type(module).forward) is not inspect.unwrap(stock.forward):
        return f"its class overrides the forward of {stock.__name__}"
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return "it is sharded: apply first, and tensor-parallel plans are not covered"
    for child in unused:
        if "forward" in child.__dict__ or any(getattr(child, hooks) for hooks in _HOOKS):
            return f"there are hooks on a {type(child).__name__} in it that would no longer be called"
    return None


def with_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """``function`` where the global names that are given mean something else.

    The attention of a family differs by arguments, caches and windows, and from one version of Transformers to the
    next; the calls that are replaced do not.
    """
    inner: Any = inspect.unwrap(function)
    # Without its __name__ torch.compile looks a name up here, and not in the module of that name.
    scope = {name: value for name, value in inner.__globals__.items() if name != "__name__"} | names
    copy = types.FunctionType(inner.__code__, scope, inner.__name__, inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy


def uses(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` reads the global ``name``."""
    return name in inspect.unwrap(function).__code__.co_names
