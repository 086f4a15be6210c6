"""How an op is called: in eager mode past torch's dispatcher, which costs the host more than a small op's arithmetic.

Torch's autograd of custom ops rebuilds the op's schema in Python for every call that has gradients, and each way from
Python through the dispatcher to a kernel, twice where the kernel is Python, costs some microseconds more. So a public
function calls one ``torch.autograd.Function`` itself, whose forward and backward call the kernel of the device. That
holds where nobody could tell: for tensors that are just memory, with nobody watching or changing what runs. Compilers,
autocast, modes, subclasses, function transforms, tracers, profilers and ``torch.ops`` find the same op with the same
formula in the dispatcher.

The private names of torch below only ask whether that is so. A torch that lacks one always takes the dispatcher.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_PLAIN = {Tensor, torch.nn.Parameter}
_NO_TENSORS = {type(None), bool, int, float, str, list, tuple, torch.dtype}
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled


def _always() -> bool:
    return True


_autocast = getattr(torch._C, "_is_any_autocast_enabled", _always)
_function_mode = getattr(torch._C, "_is_torch_function_mode_enabled", _always)
_transforms = getattr(torch._C, "_are_functorch_transforms_active", _always)
_tracing = getattr(torch._C, "_get_tracing_state", _always)
_profiler = getattr(torch.autograd, "_profiler_enabled", _always)


def _changing() -> bool:
    """Is anything in force that changes what an op does, or wants to see it?"""
    return bool(
        _autocast() or is_in_torch_dispatch_mode() or _function_mode() or _transforms() or _tracing() or _profiler()
    )


def straight(
    op: torch._ops.OpOverload, kernel: Callable[..., Any], apply: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """``op`` as a function: ``kernel``, or with gradients ``apply``, where nobody could tell, else the dispatcher."""
    if any("List[Tensor]" in str(a.type) for a in (*op._schema.arguments, *op._schema.returns)):
        return op  # autograd functions see no tensors within lists

    def call(*args: Any) -> Any:
        if _is_compiling() or _changing():
            return op(*args)
        requires_grad = False
        for a in args:
            kind = type(a)
            if kind in _PLAIN:
                # A negative view and a zero that has no memory are plain to Python, and not to a kernel.
                if a.is_neg() or a._is_zerotensor():
                    return op(*args)
                requires_grad = requires_grad or a.requires_grad
            elif kind not in _NO_TENSORS:
                return op(*args)
        if requires_grad and _is_grad_enabled():
            return op(*args) if apply is None else apply(*args)
        return kernel(*args)

    return call


def with_autograd(
    op: torch._ops.OpOverload,
    kernel: Callable[..., Any],
    setup_context: Callable[..., None] | None,
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """Gives ``op`` an autograd formula, in the form that ``torch.library.register_autograd`` takes, and returns the
    function to call it by."""
    torch.library.register_autograd(op._schema.name, backward, setup_context=setup_context)

    def forward(ctx: Any, *args: Any) -> Any:
        output = kernel(*args)
        if setup_context is not None:
            setup_context(ctx, args, output)
        return output

    function: Any = type(
        op._opname,
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )
    return straight(op, kernel, function.apply)
