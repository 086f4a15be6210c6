"""Autograd formulas of the ops, as ``torch.library.register_autograd`` registers them, at less cost to the host.

Torch's own layer rebuilds the op's schema in Python for every call that has gradients, 3 to 20 us by the number of
arguments. What is left here is what it does besides, with the same functions of torch; a torch that lacks one of them
gets the formulas by its own way.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NEEDED = ("_AutoDispatchBelowAutograd", "_after_autograd_keyset", "_any_requires_grad")


def register_autograd(
    library: torch.library.Library,
    op: torch._ops.OpOverload,
    setup_context: Callable[..., None] | None,
    backward: Callable[..., Any],
) -> None:
    """Gives ``op`` an autograd formula, in the form that ``torch.library.register_autograd`` takes.

    Ops with lists of tensors, with defaults or with keyword-only arguments go torch's way too.
    """
    name, schema = op._schema.name, op._schema
    plain = not any(
        a.kwarg_only or a.has_default_value() or "List[Tensor]" in str(a.type)
        for a in (*schema.arguments, *schema.returns)
    )
    if plain and all(hasattr(torch._C, needed) for needed in _NEEDED):
        library.impl(name.partition("::")[2], _kernel(op, setup_context, backward), "Autograd", with_keyset=True)
    else:
        torch.library.register_autograd(name, backward, setup_context=setup_context)


def _kernel(
    op: torch._ops.OpOverload, setup_context: Callable[..., None] | None, backward: Callable[..., Any]
) -> Callable[..., Any]:
    below_autograd, after_autograd = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
    any_requires_grad = torch._C._any_requires_grad

    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        with below_autograd():
            output = op.redispatch(keyset & after_autograd, *args)
            if setup_context is not None:
                setup_context(ctx, args, output)
        return output

    def differentiate(ctx: Any, *grads: Tensor | None) -> Any:
        needs = ctx.needs_input_grad
        ctx.needs_input_grad = needs[1:]  # as the formula counts arguments
        try:
            gradients = backward(ctx, *grads)
        finally:
            ctx.needs_input_grad = needs
        return (None, *gradients) if isinstance(gradients, tuple) else (None, gradients)

    function: Any = type(
        f"{op._opname}_autograd",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(differentiate)},
    )

    def kernel(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and any_requires_grad(*args):
            return function.apply(keyset, *args)
        with below_autograd():
            return op.redispatch(keyset & after_autograd, *args)

    return kernel
