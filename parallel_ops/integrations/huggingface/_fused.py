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
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel_ops.integrations.huggingface._use import watched, without_uses

# Returns the new attributes of a class, ``forward`` among them, and may return three functions of a module:
# ``changed``: what somebody has changed in it since, so that it goes to stock, or ``None``; it runs at each call.
# ``kept``: those of its ops that are not used now, with the reason; for reports alone.
# ``stock_forward``: the forward that then runs, if that of the stock class takes other arguments.
Recipe = Callable[..., dict[str, Any]]

_HOMES = tuple(str(Path(inspect.getfile(package)).parent) for package in (torch, transformers))
_RECORDER = "transformers.utils.output_capturing"
_MARK, _OPS, _CHANGED, _UNUSED = (f"_parallel_ops_{name}" for name in ("stock", "ops", "changed", "unused"))


_latest: dict[Any, type[nn.Module]] = {}


def fused_class(stock: Any, ops: tuple[str, ...], recipe: Recipe, *options: Any) -> type[nn.Module]:
    """The subclass of the module class ``stock``, as it is now, with the attributes of ``recipe(stock, *options)``."""
    key = (stock, ops, recipe, *options)
    _latest[key] = made = _fused_class(_surroundings(stock), *key)
    return made


def _surroundings(stock: Any) -> tuple[Any, ...]:
    """The forward of ``stock`` and the global names that it reads, which libraries replace."""
    inner: Any = inspect.unwrap(stock.forward)
    return stock.forward, *(id(inner.__globals__.get(name)) for name in inner.__code__.co_names)


@functools.cache
def _fused_class(surroundings: Any, stock: Any, ops: tuple[str, ...], recipe: Recipe, *options: Any) -> type[nn.Module]:
    """Makes ``fused_class``.

    Calling it makes a ``stock``, so that ``type(model)(config)`` and ``type(model).from_pretrained`` do: a new model is
    whole or not replaced at all. ``ops`` are those that it calls.
    """

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # DataParallel and Accelerate's compile_regions make a bare object, and give it the attributes of a module.
        if not args and not kwargs:
            return object.__new__(cls)
        if cls is not fused:  # a stock in its place would lack what that class adds
            raise TypeError(
                f"{cls.__name__}: its base is the class of a replaced module, of which no new ones are made; derive it "
                f"from {stock.__module__}.{stock.__name__}"
            )
        return stock(*args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return _new, (stock, ops, recipe, *options), without_uses(self.__dict__)

    made = recipe(stock, *options)
    stock_forward, changed_within = stock.forward, made.pop("changed", None)

    def changed(self: nn.Module) -> str | None:
        if stock.forward is not stock_forward:
            return f"the forward of {stock.__name__} was replaced"
        return None if changed_within is None else changed_within(self)

    def run_stock(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return stock.forward(self, *args, **kwargs)

    attributes = {
        "__new__": new,
        "__module__": stock.__module__,  # Transformers reads the source of a model's module
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "__reduce_ex__": reduce,
        _MARK: stock,
        _OPS: ops,
        _CHANGED: staticmethod(changed),
        _UNUSED: staticmethod(made.pop("kept", lambda _: {})),
    }
    run = made.pop("stock_forward", run_stock)
    attributes |= made
    if ops:
        attributes["forward"] = watched(made["forward"], run, changed, ", ".join(ops))
    fused = type(stock.__name__, (stock,), attributes)
    return fused


def _new(stock: Any, *recipe: Any) -> nn.Module:
    made: nn.Module = object.__new__(_latest.get((stock, *recipe)) or fused_class(stock, *recipe))
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


def kept_ops(module: nn.Module) -> dict[str, str]:
    """Those of ``ops_of`` that are not used, since somebody has changed something: why, by op."""
    cls: Any = type(module)
    reason = cls._parallel_ops_changed(module)
    return cls._parallel_ops_unused(module) if reason is None else dict.fromkeys(ops_of(module), reason)


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


def described(module: nn.Module | Tensor) -> str:
    """The class of ``module``, or of a weight, with the package that it is of unless that is torch or Transformers."""
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
        return "it is sharded: apply first"
    for name, child in (unused or {}).items():
        if is_hooked(child):
            return f"there are hooks on {name}, a {described(child)}, that would no longer be called"
    return None


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody wants to see or change calls of ``module``: by hooks, or by a forward of its own.

    A call that asks for hidden states or attentions leaves hooks of Transformers for good. They read the results of
    layers, the probabilities of attentions and the logits of routers, which replaced forwards return as stock's do.
    """
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    hooks = module._forward_hooks
    if hooks and any(getattr(hook, "__module__", None) != _RECORDER for hook in hooks.values()):
        return True
    return is_wrapped(module)


def _name_of(function: Any) -> str:
    """Where ``function``, or what it wraps, comes from."""
    inner = getattr(function, "func", function)  # of a partial
    return f"{getattr(inner, '__module__', None)}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"


@functools.cache
def is_own(function: Any) -> bool:
    """Whether the code of ``function`` is Transformers' or torch's: wrappers of other libraries take their names."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_HOMES)


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
