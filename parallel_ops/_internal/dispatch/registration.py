"""Registration of an op: one call, the same for all ops.

The schema and the CPU kernel are compiled (``csrc``). ``register`` adds the CUDA kernel (Triton, imported at
the first CUDA tensor), the fake (shape inference for ``torch.compile``), the autograd formula and the autocast rule,
all under torch's own dispatch keys.

The parts have the same names in every op's file: ``outputs`` and ``launch``, ``setup_context`` and ``backward``, and
``backward_outputs`` and ``launch_backward`` of the op that computes gradients.
"""

import functools
from collections.abc import Callable
from typing import Any, Concatenate

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.autograd import Library, Op, P, R, differentiable_op
from parallel_ops._internal.dispatch.flop_formulas import register_flops

_library = Library("parallel_ops", "FRAGMENT")

# The Python behind the CUDA key of each op, by name.
cuda_kernels: dict[str, Callable[..., Any]] = {}


def _launching(outputs: Callable[..., Any], launch: Callable[Concatenate[Any, P], object]) -> Callable[P, Any]:
    def cuda(*args: P.args, **kwargs: P.kwargs) -> Any:
        out = outputs(*args)
        launch(out, *args, **kwargs)
        return out

    return cuda


def register(
    name: str,
    *,
    outputs: Callable[..., object] | None = None,
    launch: Callable[Concatenate[R, P], object] | None = None,
    cuda: Callable[P, R] | None = None,
    cpu: Callable[P, R] | None = None,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., object] | None = None,
    differentiable: int | None = None,
    autocast: Callable[[torch.dtype, tuple[Any, ...]], tuple[Any, ...]] | None = None,
    flops: Callable[..., int] | None = None,
    reference: Callable[..., Any] | None = None,
) -> Op[P, R]:
    """Registers the pieces of ``parallel_ops::<name>`` and returns the function to call it by.

    Args:
        outputs: allocates the outputs, from the op's arguments; ``None`` for ops that only write over their arguments.
        launch: launches the Triton kernels that fill ``outputs``; takes these and the op's arguments.
        cuda: instead of ``launch``, for ops made of other ops and those without outputs.
        cpu: for ops made of other ops; ``None`` for the compiled CPU kernel.
        setup_context, backward: the autograd formula. An op without one (a backward op) is not differentiable:
            computing its gradient raises.
        differentiable: how many of the outputs, the first ones, have gradients; ``None`` for all.
        autocast: for ops with a formula; maps (autocast dtype, arguments) to the arguments to run with. ``None`` if
            autocast changes nothing.
        flops: for ops that multiply matrices; maps the arguments to the floating-point operations of the matmuls,
            two for each multiplication, as ``torch.utils.flop_counter`` counts them.
        reference: the op in plain PyTorch, which runs where torch's forward mode differentiates. It may leave out the
            last outputs, those that only a backward needs. ``None``: forward mode raises.
    """
    qualified = f"parallel_ops::{name}"
    if not hasattr(torch.ops.parallel_ops, name):
        raise RuntimeError(f"{name} has no compiled schema: add it to csrc/registration.cpp, then run make venv")
    op = getattr(torch.ops.parallel_ops, name).default
    torch.library.register_fake(qualified, outputs or (lambda *_: None))
    if cuda is None:
        assert outputs is not None and launch is not None
        cuda = _launching(outputs, launch)
    on_cpu = cpu or functools.partial(_redispatch(op), torch._C.DispatchKeySet(torch._C.DispatchKey.CPU))
    kernel = _kernel(op, cuda)
    cuda_kernels[name] = cuda
    _library.impl(name, _on_its_device(cuda), "CUDA")
    if cpu is not None:
        _library.impl(name, cpu, "CPU")
    if flops is not None:
        register_flops(op.overloadpacket, flops)
    call: Op[P, R]
    if backward is None or setup_context is None:
        call = Op(op, kernel, on_cpu)
        return call
    call = differentiable_op(_library, name, op, kernel, on_cpu, setup_context, backward, differentiable, reference)
    if autocast is not None:
        for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            _library.impl(name, _autocast(call, device_type, autocast), key)
    return call


def _kernel(op: torch._ops.OpOverload, cuda: Callable[..., R]) -> Callable[..., R]:
    """The kernel of the device of the first argument, unless that is the CPU, called without the dispatcher."""
    # The dispatcher would make floats of ints, and Triton compiles other kernels for ints.
    floats = [i for i, a in enumerate(op._schema.arguments) if str(a.type) == "float"]
    on_its_device = _on_its_device(cuda)

    def kernel(*args: Any) -> R:
        first = args[0]
        if not first.is_cuda:
            return op(*args)
        for i in floats:
            if type(args[i]) is not float:
                args = *args[:i], float(args[i]), *args[i + 1 :]
        if first.device.index == torch.cuda.current_device():  # as in ``_on_its_device``, without another call
            return cuda(*args)
        return on_its_device(*args)

    return kernel


def _redispatch(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """``op.redispatch``, without a Python frame around it if this torch has it."""
    handle = getattr(op, "_handle", None)
    redispatch: Callable[..., Any] = getattr(handle, "redispatch_boxed", op.redispatch)
    return redispatch


def _on_its_device(cuda: Callable[..., R]) -> Callable[..., R]:
    """Makes the device of the first argument current, since Triton launches on the current device."""

    @functools.wraps(cuda)
    def launch(first: Tensor, *args: Any) -> R:
        if first.device.index == torch.cuda.current_device():
            return cuda(first, *args)
        with torch.cuda.device(first.device):
            return cuda(first, *args)

    return launch


def _autocast(call: Callable[..., R], device_type: str, rule: Callable[..., tuple[Any, ...]]) -> Callable[..., R]:
    def run(*args: Any) -> R:
        cast = rule(torch.get_autocast_dtype(device_type), args)
        with torch.autocast(device_type, enabled=False):
            return call(*cast)

    return run


def cast_to_autocast_dtype(dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Autocast rule of ops between two matmuls: everything in the autocast dtype.

    fp64 stays fp64, as under torch's own autocast.
    """
    if any(isinstance(a, Tensor) and a.dtype is torch.float64 for a in args):
        return promote_to_widest(dtype, args)
    return tuple(a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def cast_first(count: int) -> Callable[[torch.dtype, tuple[Any, ...]], tuple[Any, ...]]:
    """Autocast rule: ``cast_to_autocast_dtype`` for the first ``count`` arguments alone."""

    def rule(dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return *cast_to_autocast_dtype(dtype, args[:count]), *args[count:]

    return rule


def promote_to_widest(_: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Autocast rule of ops that join a residual stream: the widest of the dtypes given, as PyTorch's ``+`` does."""
    dtypes = [a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()]
    widest = functools.reduce(torch.promote_types, dtypes)
    return tuple(a.to(widest) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
