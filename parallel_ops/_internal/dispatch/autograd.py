"""Calls of ops in eager mode without torch's dispatcher, which costs the host more than a small op's arithmetic.

torch's autograd of custom ops rebuilds the op's schema in Python for every call with gradients, and each pass from
Python through the dispatcher to a kernel, two if the kernel is Python, costs some microseconds more. A public function
therefore calls one ``torch.autograd.Function``, whose forward and backward call the kernel of the device. It does so
only for tensors that are plain memory, and only if nothing observes or changes what runs. Compilers, autocast, modes,
subclasses, function transforms, tracers, profilers and ``torch.ops`` find the same op with the same formula in the
dispatcher.

After the autograd engine has run, everything here is cold in the caches, at a third of a microsecond a Python function.
This file therefore has few functions on the path of a call, and a CPU kernel's own checks of tensors come first: the
Python checks, which name the argument, run after the kernel has refused.

The private names of torch below only detect such observers. A torch without one of them always takes the dispatcher.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from typing_extensions import ParamSpec

from parallel_ops._internal.dispatch.transforms import has_tangent, is_batched, no_forward_mode, sample_by_sample

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN = {Tensor, torch.nn.Parameter}
_is_compiling, _is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled


def _always() -> bool:
    return True


_autocast = getattr(torch._C, "_is_any_autocast_enabled", _always)
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", _always)
_function_mode = getattr(torch._C, "_is_torch_function_mode_enabled", _always)
_transforms = getattr(torch._C, "_are_functorch_transforms_active", _always)
_tracing = getattr(torch._C, "_get_tracing_state", _always)
_profiler = getattr(torch.autograd, "_profiler_enabled", _always)


class Op(Generic[P, R]):
    """A torch op as a function of the same arguments, all positional.

    It runs a kernel, or ``apply`` with gradients, if nothing observes the call, and else the dispatched op.

    Attributes:
        dispatched: the op itself. Unlike the function, it always returns the outputs that only a backward needs.
    """

    dispatched: Callable[P, R]

    def __init__(
        self,
        op: torch._ops.OpOverload,
        kernel: Callable[..., R],
        cpu: Callable[..., R],
        apply: Callable[..., R] | None = None,
        reference: Callable[..., Any] | None = None,
    ) -> None:
        arguments = op._schema.arguments
        self._name, self._reference, self._num_outputs = op._opname, reference, len(op._schema.returns)
        kinds = [str(a.type) for a in (*arguments, *op._schema.returns)]
        self.dispatched, self._kernel, self._cpu, self._apply = op, kernel, cpu, apply
        # Autograd functions see no tensors within lists.
        self._has_lists = any("List[Tensor]" in kind for kind in kinds)
        self._tensors = [i for i, kind in enumerate(kinds[: len(arguments)]) if "Tensor" in kind]

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
        def checked(self, check: Callable[[], None], *args: P.args, **kwargs: P.kwargs) -> R: ...

    else:

        def __call__(self, *args):
            return self._implementation(args)(*args)

        def checked(self, check, *args):
            """Calls the op, and ``check``, which raises if the arguments are bad.

            ``check`` runs first, except for a CPU kernel, which must refuse the same arguments by itself: there it runs
            after the kernel has raised.
            """
            run = self._implementation(args)
            if run is self.dispatched or not args[0].is_cpu:
                check()
                return run(*args)
            try:
                return run(*args)
            except (RuntimeError, TypeError):
                check()
                raise

    def _implementation(self, args: tuple[Any, ...]) -> Callable[..., R]:
        if forward_ad._current_level >= 0 and has_tangent(args):
            if self._reference is None:
                raise no_forward_mode(self._name)
            return self._in_torch
        if (
            self._has_lists
            or _is_compiling()
            or _autocast()
            or _dispatch_modes()
            or _function_mode()
            or _transforms()
            or _tracing()
            or _profiler()
        ):
            return self._transformed if not _is_compiling() and _transforms() else self.dispatched
        requires_grad = False
        for i in self._tensors:
            a = args[i]
            if a is None:
                continue
            # A negative view and a zero that has no memory are plain to Python, and not to a kernel.
            if type(a) not in _PLAIN or a.is_neg() or a._is_zerotensor():
                return self.dispatched
            requires_grad = requires_grad or a.requires_grad
        if requires_grad and _is_grad_enabled():
            return self._apply or self.dispatched
        return self._cpu if args[0].is_cpu else self._kernel

    def _in_torch(self, *args: Any) -> Any:
        """The outputs in plain PyTorch, which carries tangents; those that only a backward needs are ``None``."""
        assert self._reference is not None
        outputs = self._reference(*args)
        if self._num_outputs == 1:
            return outputs
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return *outputs, *(None,) * (self._num_outputs - len(outputs))

    def _transformed(self, *args: Any) -> Any:
        """Under torch.func, whose ``vmap`` every op has, by a loop, and whose ``grad`` none."""
        try:
            return self.dispatched(*args)  # type: ignore[call-arg]
        except RuntimeError as error:
            if "setup_context" not in str(error):
                raise
            raise RuntimeError(
                f"{self._name}: torch.func's grad, vjp and jacobians do not go through this op; call .backward() or "
                "torch.autograd.grad on what it, or torch.func.functional_call of a module with it, returns"
            ) from error


class Library(torch.library.Library):
    """A library whose autograd formulas refuse tangents, which torch's own kernel for such formulas drops."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        if dispatch_key != "Autograd":
            return super().impl(op_name, fn, dispatch_key, **options)

        def checked(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if forward_ad._current_level >= 0 and has_tangent(args):
                raise no_forward_mode(op_name)
            return fn(keyset, *args, **kwargs)

        return super().impl(op_name, checked, dispatch_key, **options)


def differentiable_op(
    library: Library,
    name: str,
    op: torch._ops.OpOverload,
    kernel: Callable[..., R],
    cpu: Callable[..., R],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    differentiable: int | None,
    reference: Callable[..., Any] | None,
) -> Op[P, R]:
    """Gives ``op`` an autograd formula, in the form that ``torch.library.register_autograd`` takes.

    Args:
        library: keeps the formula.
        differentiable: how many of the op's outputs, the first ones, have gradients; ``None`` for all. The others are
            for the backward: with gradients and past the dispatcher, the function returns ``None`` in their places,
            since autograd takes a microsecond for each that it sees.
    """
    formula = once_differentiable(name, backward)
    torch.library.register_autograd(op._schema.name, formula, setup_context=setup_context, lib=library)
    others = () if differentiable is None else (None,) * (len(op._schema.returns) - differentiable)

    def forward(ctx: Any, *args: Any) -> object:
        output: Any = (cpu if args[0].is_cpu else kernel)(*args)
        setup_context(ctx, args, output)
        return (*output[:differentiable], *others) if others else output

    function: Any = type(
        op._opname,
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(formula)},
    )
    # Past what torch.autograd.Function does in Python for function transforms, which are not in force here.
    return Op(op, kernel, cpu, super(torch.autograd.Function, function).apply, reference)


def once_differentiable(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward``, refusing ``create_graph=True``, which would otherwise drop second derivatives silently.

    Gradients with a hidden batch dimension, of ``is_grads_batched=True`` or ``torch.func.vmap``, take it sample by
    sample.
    """

    def checked(ctx: Any, *grads: Any) -> Any:
        if _is_grad_enabled():
            raise RuntimeError(
                f"{name}: second derivatives are not implemented; with create_graph=True use {name}_reference"
            )
        if not _is_compiling():
            for grad in grads:
                if is_batched(grad):
                    return sample_by_sample(name, checked, ctx, grads)
        return backward(ctx, *grads)

    return checked
