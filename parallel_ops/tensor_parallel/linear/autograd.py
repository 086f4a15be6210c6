"""Shared by the linears over a group: checks, the torch ops, autograd.

Each op is a subclass with two methods of a ``GroupCall``: its forward, and its gradients, which pass the factors of the
weight gradients to a callback as soon as these are available. The forward is also a registered op, opaque to
``torch.compile``, dispatch modes and tensor subclasses. Eager calls with gradients bypass it and use one autograd
function: torch's autograd of ops that take lists of tensors costs the host several times as much.

A backward computes, and sends, only what the running graph task needs: ``autograd.grad(y, [x])`` leaves weight
gradients alone, and a backward that a pipeline schedule splits does each half once. A deferred weight gradient is such
a half, run when its queue is computed.
"""

import abc
import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from parallel_ops._internal.dispatch.autograd import once_differentiable
from parallel_ops._internal.dispatch.registration import cast_to_autocast_dtype, register
from parallel_ops._internal.distributed.groups import group_name, is_fp32
from parallel_ops._internal.gradients.split_backward import runs
from parallel_ops._internal.gradients.weight_gradients import (
    DeferredFactors,
    DeferredWeightGradients,
    Target,
    add_to,
    after_backward,
    targets_of,
)
from parallel_ops.comm.consistency import propagate_errors
from parallel_ops.tensor_parallel.linear.call import GroupCall, LinearOptions, WeightGradients, check_arguments, encode
from parallel_ops.tensor_parallel.linear.chunked import matrix

# Entering a disabled autocast costs the host as much as a small matmul.
_NOTHING = nullcontext()
_ALL = slice(None)

T = TypeVar("T")


def _as_list(one_or_several: T | Sequence[T]) -> list[T]:
    return list(one_or_several) if isinstance(one_or_several, list | tuple) else [one_or_several]  # type: ignore[list-item]


class LinearOp(abc.ABC):
    """A linear over a group as a torch op.

    Args:
        name: of the op and its schema.
    """

    # The gradient of x needs the output's gradient of all rows, as those of the weights do.
    gathers_gradient = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._backward_op = register(
            f"{name}_backward",
            outputs=self._backward_outputs,
            cpu=self._backward,
            cuda=self._backward,
            flops=self._flops_of_backward,
        )
        self._op = register(
            name,
            outputs=self._outputs,
            cpu=self._run,
            cuda=self._run,
            setup_context=self._setup_context,
            backward=self._autograd,
            autocast=_cast_all,
            flops=self._flops,
        )

    @abc.abstractmethod
    def forward(self, call: GroupCall, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        """The outputs, which are not views: a pipeline stage detaches its output."""

    @abc.abstractmethod
    def input_gradient(
        self, call: GroupCall, grads: list[Tensor], x: Tensor, weights: list[Tensor], products: WeightGradients
    ) -> tuple[Tensor | None, Sequence[Tensor]]:
        """The gradient of x, ``None`` if it is not needed, and the output gradients of all rows, as matrices.

        Calls ``products`` once for each weight whose gradient is wanted. It reads the weights for the gradient of x
        alone, and x for those of the weights.
        """

    @abc.abstractmethod
    def split(self, x: Tensor, sizes: Sequence[int] | None, group: ProcessGroup | None) -> list[int]:
        """``GroupCall.sizes`` of a call, checked."""

    def rows(self, call: GroupCall) -> int:
        """The first dimension of the outputs."""
        return sum(call.sizes)

    def __call__(
        self, x: Tensor, weight: Tensor | Sequence[Tensor], bias: Tensor | Sequence[Tensor] | None,
        options: LinearOptions,
    ) -> Any:  # fmt: skip
        """Checks all arguments and runs; returns one tensor for one weight, a tuple for several."""
        group, deferred = options.group, options.deferred
        weights, biases = _as_list(weight), [] if bias is None else _as_list(bias)
        main_grads: list[Target] | None = None if options.main_grad is None else _as_list(options.main_grad)
        group_id = group_name(self.name, group)
        with propagate_errors(self.name, group, x, *weights, checked=True):
            check_arguments(self.name, x, weights, biases, group)
            targets = targets_of(self.name, weights, main_grads, deferred)
            code, fp32 = encode(self.name, options.overlap), is_fp32(self.name, options.grad_reduce)
            shards = self.split(x, options.sizes, group)
        grad = torch.is_grad_enabled()
        needs = [grad and t.requires_grad for t in (x, *weights, *biases)]
        more = () if options.partial_bias is None else (options.partial_bias,)
        arguments: tuple[Any, ...] = (group_id, shards, code, needs, fp32, *more)
        tensors = x, *weights, *biases
        handled = any(n and t is not None for n, t in zip(needs[1:], targets, strict=False))
        if handled or (any(needs) and _can_bypass_dispatcher(tensors)):
            call = GroupCall(self.name, *arguments)
            outputs = _Linear.apply(self, call, targets, deferred if handled else None, *tensors)
        else:
            outputs = self._op(x, weights, biases, *arguments)
        return outputs[0] if isinstance(weight, Tensor) else tuple(outputs)

    def gradients(
        self, call: GroupCall, grads: list[Tensor], x: Tensor, weights: list[Tensor], targets: Sequence[Target]
    ) -> list[Tensor | None]:
        """Gradients of x, each weight and each bias; ``None`` if ``call`` does not need it or a target gets it."""
        needed = call.needs_weights(len(weights))
        dweights: list[Tensor | None] = [None] * len(weights)

        def products(dys: Sequence[Tensor], inputs: Tensor, part: slice = _ALL, /) -> None:
            for i in range(len(weights))[part]:
                dweights[i] = add_to(targets[i], dys[i], inputs) if needed[i] else None

        with _autocast_disabled(x):
            dx, dys = self.input_gradient(call, grads, x, weights, products)
            summed = [matrix(g) for g in grads] if call.partial_bias else dys
            biases = zip(summed, call.needs_biases(len(weights)), strict=False)
            return [dx, *dweights, *(dy.sum(0) if n else None for dy, n in biases)]

    def _run(self, x: Tensor, weights: list[Tensor], biases: list[Tensor], *arguments: Any) -> list[Tensor]:
        return self.forward(GroupCall(self.name, *arguments), x, weights, biases)

    def _backward(self, x: Tensor, grads: list[Tensor], weights: list[Tensor], *arguments: Any) -> tuple[Any, ...]:
        n = len(weights)
        all_of_it = self.gradients(GroupCall(self.name, *arguments), grads, x, weights, [None] * n)
        dx, *others = [x.new_empty(0) if d is None else d for d in all_of_it]
        return dx, others[:n], others[n:]

    def _flops(self, x: Tensor, weights: list[Tensor], biases: list[Tensor], *arguments: Any) -> int:
        rows = math.prod(x.shape[1:-1]) * max(x.shape[0], self.rows(GroupCall(self.name, *arguments)))
        return 2 * rows * sum(w.numel() for w in weights)

    def _flops_of_backward(self, x: Tensor, grads: list[Tensor], weights: list[Tensor], *arguments: Any) -> int:
        """A matmul for the gradient of x and one for each weight's, of all rows on either side of the op."""
        needs = GroupCall(self.name, *arguments).needs
        rows = math.prod(x.shape[1:-1]) * max(x.shape[0], grads[0].shape[0])
        return 2 * rows * sum(w.numel() * (needs[0] + need) for w, need in zip(weights, needs[1:], strict=False))

    def _outputs(self, x: Tensor, weights: list[Tensor], biases: list[Tensor], *arguments: Any) -> list[Tensor]:
        rows = self.rows(GroupCall(self.name, *arguments))
        return [x.new_empty((rows, *x.shape[1:-1], w.shape[0])) for w in weights]

    def _backward_outputs(self, x: Tensor, _: list[Tensor], weights: list[Tensor], *arguments: Any) -> tuple[Any, ...]:
        call, n = GroupCall(self.name, *arguments), len(weights)
        return (
            x.new_empty(x.shape if call.needs[0] else 0),
            [w.new_empty(w.shape if need else 0) for w, need in zip(weights, call.needs_weights(n), strict=True)],
            [w.new_empty(w.shape[0] if need else 0) for w, need in zip(weights, call.needs_biases(n), strict=False)],
        )

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        x, weights, _, *ctx.arguments = inputs
        _save(ctx, GroupCall(self.name, *ctx.arguments), x, weights)

    def _autograd(self, ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
        x, weights = _saved(ctx, grads)
        call = ctx.call._replace(needs=_requested(ctx))
        group, sizes, overlap, _, *more = ctx.arguments
        dx, dweights, dbiases = self._backward_op(x, grads, weights, group, sizes, overlap, call.needs, *more)
        n = len(weights)
        return (
            dx if call.needs[0] else None,
            [d if needed else None for d, needed in zip(dweights, call.needs_weights(n), strict=True)],
            [d if needed else None for d, needed in zip(dbiases, call.needs_biases(n), strict=True)],
            *(None,) * len(ctx.arguments),
        )


def _autocast_disabled(x: Tensor) -> AbstractContextManager[None]:
    """Disables autocast: inputs are cast already, also in a backward that runs inside its region."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


def _can_bypass_dispatcher(tensors: Sequence[Tensor]) -> bool:
    """True if no compiler, dispatch mode or tensor subclass needs to intercept this op."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return False
    return all(type(t) in (Tensor, nn.Parameter) for t in tensors)


def _save(ctx: Any, call: GroupCall, x: Tensor, weights: list[Tensor]) -> None:
    """Saves x if a weight needs a gradient, the weights if x does, and all shapes."""
    ctx.call, ctx.shapes = call, (x.shape, [w.shape for w in weights])
    needs_weight = any(call.needs_weights(len(weights)))
    ctx.save_for_backward(*([x] if needs_weight else []), *(weights if call.needs[0] else []))


def _saved(ctx: Any, grads: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """x and the weights; for those not saved, which are not read, an expanded scalar of the same shape."""
    saved, (shape, shapes) = list(ctx.saved_tensors), ctx.shapes
    x = saved.pop(0) if any(ctx.call.needs_weights(len(shapes))) else _shaped(grads[0], shape)
    return x, saved or [_shaped(grads[0], s) for s in shapes]


def _shaped(like: Tensor, shape: torch.Size) -> Tensor:
    return like.new_empty(()).expand(shape)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: LinearOp,
        call: GroupCall,
        targets: list[Target],
        deferred: DeferredWeightGradients | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        device, cast = tensors[0].device.type, list(tensors)
        if torch.is_autocast_enabled(device):
            cast = list(cast_to_autocast_dtype(torch.get_autocast_dtype(device), tensors))
        x, weights, biases = cast[0], cast[1 : 1 + len(targets)], cast[1 + len(targets) :]
        # No tensors on ctx except by save_for_backward: the context lives as long as the loss.
        ctx.op, ctx.targets, ctx.deferred = op, targets, deferred
        ctx.dtypes = [t.dtype for t in tensors]
        _save(ctx, call, x, weights)
        if is_in_torch_dispatch_mode():
            # A mode sees one op, as without targets: selective recomputation keeps its output, and must not keep
            # buffers that the forward writes to.
            dispatched: Any = op._op.dispatched
            return tuple(dispatched(x, weights, biases, *call[1 : len(dispatched._schema.arguments) - 2]))
        with torch.cuda.device_of(x) if x.is_cuda else _NOTHING, _autocast_disabled(x):
            return tuple(op.forward(call, x, weights, biases))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return once_differentiable(ctx.op.name, _eager_backward)(ctx, *grads)


def _eager_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    x, weights = _saved(ctx, grads)
    needs = _requested(ctx)
    call = ctx.call if needs == ctx.call.needs else ctx.call._replace(needs=needs)
    n, postponed = len(weights), list[DeferredFactors]()
    of_weights = call.needs_weights(n)
    if ctx.deferred is not None and any(of_weights):
        if ctx.deferred.keep_gathered and ctx.op.gathers_gradient and call.needs[0]:
            postponed = [DeferredFactors(target) for target in ctx.targets]
        else:
            nothing = [False] * len(call.needs)
            later = call._replace(needs=[False, *of_weights, *nothing[1 + n :]])
            shapes = [_shaped(x, w.shape) for w in weights]
            compute = functools.partial(ctx.op.gradients, later, list(grads), x, shapes, ctx.targets)
            ctx.deferred.push(after_backward(compute, x, *grads))
            call = call._replace(needs=[call.needs[0], *nothing[:n], *call.needs_biases(n)])
    gradients = ctx.op.gradients(call, list(grads), x, weights, postponed or ctx.targets)
    for each in postponed:
        if each.factors:  # of a weight that is not frozen
            ctx.deferred.push(after_backward(each.compute, *each.factors))
    gradients += [None] * (len(ctx.dtypes) - len(gradients))
    return None, None, None, None, *(d if d is None else d.to(t) for d, t in zip(gradients, ctx.dtypes, strict=True))


def _requested(ctx: Any) -> list[bool]:
    """``GroupCall.needs`` of the running backward."""
    edges = zip(ctx.call.needs, ctx.next_functions, strict=True)
    return [needed and runs(node) for needed, (node, _) in edges]


def _cast_all(dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Autocast rule: x, weights and biases in the autocast dtype (fp64 stays)."""
    x, weights, biases, *rest = args
    cast = cast_to_autocast_dtype(dtype, (x, *weights, *biases))
    n = len(weights)
    return cast[0], list(cast[1 : 1 + n]), list(cast[1 + n :]), *rest
