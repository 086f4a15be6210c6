"""How an op is called: in eager mode past torch's dispatcher, which costs the host more than a small op's arithmetic.

Torch's autograd of custom ops rebuilds the op's schema in Python for every call that has gradients, and each way from
Python through the dispatcher to a kernel, twice where the kernel is Python, costs some microseconds more. So a public
function calls one ``torch.autograd.Function`` itself, whose forward and backward call the kernel of the device. That
holds where nobody could tell: for tensors that are just memory, with nobody watching or changing what runs. Compilers,
dispatch modes, subclasses, function transforms, profilers, autocast and ``torch.ops`` find the same op with the same
formula in the dispatcher.

The private names of torch below only ask whether that is so. A torch that lacks one always takes the dispatcher.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_PLAIN = {Tensor, torch.nn.Parameter}
_is_compiling = torch.compiler.is_compiling


def _always() -> bool:
    return True


_transforms = getattr(torch._C, "_are_functorch_transforms_active", _always)
_autocast = getattr(torch._C, "_is_any_autocast_enabled", _always)
_profiler = getattr(torch.autograd, "_profiler_enabled", _always)


def _changing() -> bool:
    """Is anything in force that changes what an op does, or wants to see it?"""
    return bool(_autocast() or is_in_torch_dispatch_mode() or _transforms() or _profiler())


def straight(op: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` where nobody could tell the difference, else ``op``."""

    def call(*args: Any) -> Any:
        if _is_compiling() or _changing():
            return op(*args)
        for a in args:
            # A negative view and a zero that has no memory are plain to Python, and not to a kernel.
            if isinstance(a, Tensor) and (type(a) not in _PLAIN or a.is_neg() or a._is_zerotensor()):
                return op(*args)
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
    if any("List[Tensor]" in str(a.type) for a in (*op._schema.arguments, *op._schema.returns)):
        return op  # autograd functions see no tensors within lists

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
    apply, is_grad_enabled = function.apply, torch.is_grad_enabled

    def differentiated(*args: Any) -> Any:
        if is_grad_enabled():
            for a in args:
                if isinstance(a, Tensor) and a.requires_grad:
                    return apply(*args)
        return kernel(*args)

    return straight(op, differentiated)
