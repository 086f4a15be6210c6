"""Plans of what a call launches on a CUDA device, taken down in Python and replayed by C++ (csrc/cuda/launch_plan.cpp).

The first two calls of a kind run here, the second under a mode that sees every torch op: whatever only allocates or
makes views can be replayed; a call that copies, fills or computes with other ops (an input that no view makes
contiguous, say) cannot, and always runs in Python. What a kernel is given is found again by its address, that of an
argument of the op or of a tensor that was allocated during the call.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from parallel_ops.triton_kernels._launch import Launch

_CONSTANT = -1
_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}

# c10::ScalarType, whose values are part of torch's file formats, of what the ops allocate.
_DTYPE_CODES = {
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bfloat16: 15,
}

# What C++ says when the Python that it called raised; which error that was does not come through torch's interface.
_FAILED = "the call failed in Python"
_errors = threading.local()
# The mode's own bookkeeping is one for all threads.
_one_at_a_time = threading.RLock()


def planned(op: Callable[..., Any]) -> Callable[..., Any]:
    """``op``, whose kernel is C++ that may call Python, with the errors of that Python as they were raised there."""

    @functools.wraps(op)
    def call(*args: Any) -> Any:
        try:
            return op(*args)
        except RuntimeError as error:
            raised = _errors.__dict__.pop("pending", None) if _FAILED in str(error) else None
            if raised is None:
                raise
            try:
                raise raised from None
            finally:
                del raised  # with its traceback, which holds this frame, it would wait for the garbage collector

    return call


def python_kernel(cuda: Callable[..., Any]) -> Callable[..., Any]:
    """``cuda``, which allocates outputs and launches Triton kernels, as what C++ calls for want of a plan."""

    def kernel(*args: Any) -> Any:
        ops = torch.ops.parallel_ops
        try:
            if not ops.launch_plan_wanted():
                return cuda(*args)
            with _one_at_a_time:
                outputs, plan = record(cuda, args)
            if plan is not None:
                ops.keep_launch_plan(plan)
            return outputs
        except BaseException as error:
            ops.report_launch_failure(f"{type(error).__name__}: {error}")
            # Kept until the next failure where nobody asks for it: without the frames, which hold the call's tensors.
            _errors.pending = error.with_traceback(None)
            raise RuntimeError(f"{_FAILED}: {type(error).__name__}") from None

    return kernel


class _Allocations(TorchDispatchMode):
    """Notes the tensors allocated, and whether anything was done that a replay would miss."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self.repeatable = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.tensors.append(result)
        elif getattr(func, "is_view", False):
            # From its own beginning, so that an address tells which tensor was meant.
            self.repeatable &= isinstance(result, Tensor) and result.data_ptr() == args[0].data_ptr()
        elif any(isinstance(t, Tensor) for t in (result, *args)):
            self.repeatable = False
        return result


def record(cuda: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, list[int] | None]:
    """``cuda(*args)`` and its plan as C++ reads it, or ``None`` if the call cannot be replayed."""
    from parallel_ops.triton_kernels._launch import noted

    with _Allocations() as allocations, noted() as launches:
        outputs = cuda(*args)
    if not allocations.repeatable:
        return outputs, None
    returned = () if outputs is None else (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    try:
        positions = _positions(allocations.tensors, returned)
        bases = [*(a.data_ptr() if isinstance(a, Tensor) else None for a in args)]
        bases += [t.data_ptr() for t in allocations.tensors]
        plan = [len(allocations.tensors)]
        for tensor in allocations.tensors:
            if tensor.device != args[0].device:
                raise LookupError("an allocation on another device")
            plan += [_DTYPE_CODES[tensor.dtype], tensor.dim(), *tensor.shape, tensor.dim(), *tensor.stride()]
        plan += [len(positions), *positions, len(launches)]
        for launch in launches:
            plan += _words(launch, bases)
    except LookupError:
        return outputs, None
    return outputs, [_signed(word) for word in plan]


def _positions(tensors: Sequence[Tensor], returned: Sequence[Tensor]) -> list[int]:
    """Which of ``tensors`` each of ``returned`` is. Not by identity: torch's factory functions return a copy of the
    tensor that the mode saw, over the same memory."""
    left = {i: _description(t) for i, t in enumerate(tensors)}
    positions = []
    for tensor in returned:
        wanted = _description(tensor)
        position = next((i for i, seen in left.items() if seen == wanted), None)
        if position is None:
            raise LookupError("an output that was not allocated in the call")
        del left[position]
        positions.append(position)
    return positions


def _description(t: Tensor) -> tuple[object, ...]:
    return t.data_ptr(), t.dtype, t.shape, t.stride()


def _words(launch: "Launch | None", bases: Sequence[int | None]) -> list[int]:
    if launch is None:
        raise LookupError("a launch that only Triton can repeat")
    words = [launch.function, *launch.grid, launch.threads, launch.shared_bytes, len(launch.arguments)]
    for argument in launch.arguments:
        if isinstance(argument, int):
            words += [_CONSTANT, argument]
        elif argument.data_ptr() == 0:
            words += [_CONSTANT, 0]
        elif argument.data_ptr() in bases:
            words += [bases.index(argument.data_ptr()), 0]
        else:
            raise LookupError("a pointer to none of the call's tensors")
    return words


def _signed(word: int) -> int:
    """A 64-bit word as the int64 that holds its bits."""
    return word - 2**64 if word >= 2**63 else word
