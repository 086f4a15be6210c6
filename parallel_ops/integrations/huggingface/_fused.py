"""Replaces a module's forward by changing its class.

The new class is a subclass of the module's class with another forward and the same name. So parameters, buffers, hooks
and children stay the same objects under the same names; ``isinstance`` and lookups by class name (FSDP's wrapping,
Transformers' layer lists, ``config.architectures``) work as before; and undoing it is to restore the class. Weights are
read only in the forward of the module that holds them, so sharding, offloading and adapters that hook or wrap modules
work as before.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from parallel_ops.integrations.huggingface._use import counted, without_uses

# Returns the new attributes of a class, ``forward`` among them.
Recipe = Callable[..., dict[str, Any]]

_MARK, _OPS = "_parallel_ops_stock", "_parallel_ops_ops"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@functools.cache
def fused_class(stock: Any, ops: tuple[str, ...], recipe: Recipe, *options: Any) -> type[nn.Module]:
    """The subclass of the module class ``stock`` with the attributes of ``recipe(stock, *options)``.

    Calling it makes a ``stock``, so that ``type(model)(config)`` and ``type(model).from_pretrained`` do: a new model is
    whole or not replaced at all. ``ops`` are those that it calls.
    """

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return _new, (stock, ops, recipe, *options), without_uses(self.__dict__)

    attributes = {
        "__new__": new,
        "__module__": stock.__module__,  # Transformers reads the source of a model's module
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "__reduce_ex__": reduce,
        _MARK: stock,
        _OPS: ops,
        **recipe(stock, *options),
    }
    if ops:
        attributes["forward"] = counted(attributes["forward"])
    return type(stock.__name__, (stock,), attributes)


def _new(stock: Any, *recipe: Any) -> nn.Module:
    made: nn.Module = object.__new__(fused_class(stock, *recipe))
    return made


def stock_class(module: nn.Module) -> type[nn.Module] | None:
    """The class of ``module`` before it was replaced; ``None`` if it was not."""
    return getattr(type(module), _MARK, None)


def is_fused(module: nn.Module) -> bool:
    """Whether the class of ``module`` is one of ``fused_class``, and not one that FSDP has derived from it."""
    return _MARK in vars(type(module))


def ops_of(module: nn.Module) -> tuple[str, ...]:
    """The ops that the replaced forward of ``module`` calls."""
    return getattr(type(module), _OPS, ())


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Gives ``module`` another class, also where Accelerate has wrapped its forward to move or load weights."""
    hooked = has_offloading_hook(module)
    module.__class__ = cls
    if hooked:
        module.__dict__["_old_forward"] = types.MethodType(cls.forward, module)


def has_offloading_hook(module: nn.Module) -> bool:
    """Whether what has replaced the forward of ``module`` is a hook of Accelerate around the forward of its class."""
    inner = module.__dict__.get("_old_forward")
    wrapped = "forward" in module.__dict__ and hasattr(module, "_hf_hook") and isinstance(inner, types.MethodType)
    return wrapped and inner is not None and inner.__func__ is type(module).forward


def is_wrapped(module: nn.Module) -> bool:
    """Whether ``module`` has a forward of its own, which would still call that of its old class."""
    return "forward" in module.__dict__ and not has_offloading_hook(module)


def described(module: nn.Module) -> str:
    """The class of ``module``, with the package that it is of unless that is torch or Transformers."""
    cls = type(module)
    known = cls.__module__.partition(".")[0] in ("torch", "transformers", "builtins")
    return cls.__name__ if known else f"{cls.__module__}.{cls.__qualname__}"


def obstacle(module: nn.Module, stock: type[nn.Module], unused: Mapping[str, nn.Module] | None = None) -> str | None:
    """Why the forward of ``module``, a ``stock``, cannot be replaced by one that skips the modules ``unused``."""
    if is_wrapped(module):
        return f"something else has replaced its forward ({_name_of(module.forward)})"
    if inspect.unwrap(type(module).forward) is not inspect.unwrap(stock.forward):
        return f"its class {described(module)} overrides the forward of {stock.__name__}"
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return "it is sharded: apply first, and tensor-parallel plans are not covered"
    for name, child in (unused or {}).items():
        wrapped = is_wrapped(child) if child is module else "forward" in child.__dict__
        if wrapped or any(getattr(child, hooks) for hooks in _HOOKS):
            return f"there are hooks on {name}, a {described(child)}, that would no longer be called"
    return None


def _name_of(function: Any) -> str:
    """Where ``function``, or what it wraps, comes from."""
    inner = getattr(function, "func", function)  # of a partial
    return f"{getattr(inner, '__module__', None)}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def with_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of ``function`` with some of its global names replaced.

    Attention differs between families and versions of Transformers in arguments, caches and windows; the functions that
    it calls, which are replaced, do not.
    """
    inner: Any = inspect.unwrap(function)
    # Without __name__, torch.compile looks names up here and not in the module of that name.
    scope = {name: value for name, value in inner.__globals__.items() if name != "__name__"} | names
    copy = types.FunctionType(inner.__code__, scope, inner.__name__, inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy


def uses(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` reads the global ``name``."""
    return name in inspect.unwrap(function).__code__.co_names
