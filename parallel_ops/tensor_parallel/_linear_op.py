"""What all_gather_linear and linear_reduce_scatter share: checks, registration, autograd.

Each op gives two functions of a ``LinearCall``: its forward, and its gradients, which hands the factors of the weight
gradients to a callback as soon as it has them. What the callback does with them is decided here: multiply them for
autograd, add the product to a ``main_grad``, or queue that for later. The first is also a registered op, opaque to
``torch.compile``, to dispatch modes and to tensor subclasses. Eager calls with gradients go past it, to an autograd
function that does all three: torch's autograd of ops that take lists of tensors costs the host several times as much.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from parallel_ops.comm._agreement import announcing
from parallel_ops.comm._group import group_name
from parallel_ops.ops._registration import cast_to_autocast_dtype, once_differentiable, register
from parallel_ops.tensor_parallel import _overlap_plan as plan
from parallel_ops.tensor_parallel._linear_call import LinearCall
from parallel_ops.tensor_parallel._linear_checks import check_linear
from parallel_ops.tensor_parallel.weight_gradients import DeferredWeightGradients, Target, add_to, targets_of

# (output gradients, inputs): matrices of the same rows, of which the weight gradients are products.
Factors = Callable[[Sequence[Tensor], Tensor], None]


def flat(t: Tensor) -> Tensor:
    """``[..., N]`` as a contiguous matrix."""
    return t.reshape(-1, t.shape[-1]).contiguous()


class LinearOp:
    """A linear over a group as a torch op.

    Args:
        name: of the op and its schema.
        forward: ``(call, x, weights, biases)`` to outputs.
        gradients: ``(call, grads, x, weights, factors)`` to the gradient of x, ``None`` where it is not wanted, and
            the output gradients of all rows, as matrices. Calls ``factors``, if given, exactly once.
        rows: the first dimension of the outputs.
    """

    def __init__(
        self,
        name: str,
        *,
        forward: Callable[[LinearCall, Tensor, list[Tensor], list[Tensor]], list[Tensor]],
        gradients: Callable[
            [LinearCall, list[Tensor], Tensor, list[Tensor], Factors | None], tuple[Tensor | None, Sequence[Tensor]]
        ],
        rows: Callable[[LinearCall], int],
    ) -> None:
        self.name, self._forward, self._gradients, self._rows = name, forward, gradients, rows
        self._backward_op = register(
            f"{name}_backward", fake=self._fake_backward, cpu=self._backward, cuda=self._backward
        )
        self._op = register(
            name,
            fake=self._fake,
            cpu=self._run,
            cuda=self._run,
            setup_context=self._setup_context,
            backward=self._autograd,
            autocast=_cast_all,
        )

    def __call__(
        self,
        x: Tensor,
        weights: list[Tensor],
        biases: list[Tensor],
        main_grads: list[Target] | None,
        deferred: DeferredWeightGradients | None,
        group: ProcessGroup | None,
        overlap: plan.Overlap,
        split: Callable[[], list[int]],
    ) -> list[Tensor]:
        """Checks everything, ``split()`` (the sizes) last, and runs."""
        group_id = group_name(self.name, group)
        with announcing(self.name, group, x, *weights, asks=True):
            check_linear(self.name, x, weights, biases, group)
            targets = targets_of(self.name, weights, main_grads, deferred)
            pieces, sizes = plan.encode(self.name, overlap), split()
        grad = torch.is_grad_enabled()
        needs = [grad and t.requires_grad for t in (x, *weights, *biases)]
        arguments = group_id, sizes, pieces, needs
        tensors = x, *weights, *biases
        handled = any(t is not None for t in targets) and any(needs[1 : 1 + len(weights)])
        if handled or (any(needs) and _unwatched(tensors)):
            return list(_Linear.apply(self, (targets, deferred), arguments, len(weights), *tensors))
        return self._op(x, weights, biases, *arguments)

    def _run(self, x: Tensor, weights: list[Tensor], biases: list[Tensor], *arguments: Any) -> list[Tensor]:
        return self._forward(LinearCall(self.name, *arguments), x, weights, biases)

    def _backward(self, x: Tensor, grads: list[Tensor], weights: list[Tensor], *arguments: Any) -> tuple[Any, ...]:
        call, n = LinearCall(self.name, *arguments), len(weights)
        dweights = [w.new_empty(0) for w in weights]

        def multiply(dys: Sequence[Tensor], inputs: Tensor) -> None:
            for i, needed in enumerate(call.needs_weights(n)):
                if needed:
                    dweights[i] = dys[i].t() @ inputs

        with torch.autocast(x.device.type, enabled=False):  # of a backward inside the region: all dtypes are settled
            dx, dys = self._gradients(call, grads, x, weights, multiply if any(call.needs_weights(n)) else None)
        dbiases = [
            dy.sum(0) if needed else dy.new_empty(0) for dy, needed in zip(dys, call.needs_biases(n), strict=False)
        ]
        return x.new_empty(0) if dx is None else dx, dweights, dbiases

    def _fake(self, x: Tensor, weights: list[Tensor], biases: list[Tensor], *arguments: Any) -> list[Tensor]:
        rows = self._rows(LinearCall(self.name, *arguments))
        return [x.new_empty((rows, *x.shape[1:-1], w.shape[0])) for w in weights]

    def _fake_backward(self, x: Tensor, _: list[Tensor], weights: list[Tensor], *arguments: Any) -> tuple[Any, ...]:
        call, n = LinearCall(self.name, *arguments), len(weights)
        return (
            x.new_empty(x.shape if call.needs[0] else 0),
            [w.new_empty(w.shape if need else 0) for w, need in zip(weights, call.needs_weights(n), strict=True)],
            [w.new_empty(w.shape[0] if need else 0) for w, need in zip(weights, call.needs_biases(n), strict=False)],
        )

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        x, weights, _, *ctx.arguments = inputs
        _save(ctx, LinearCall(self.name, *ctx.arguments), x, weights)

    def _autograd(self, ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
        call = LinearCall(self.name, *ctx.arguments)
        x, weights = _saved(ctx, call, grads)
        dx, dweights, dbiases = self._backward_op(x, grads, weights, *ctx.arguments)
        n = len(weights)
        return (
            dx if call.needs[0] else None,
            [d if needed else None for d, needed in zip(dweights, call.needs_weights(n), strict=True)],
            [d if needed else None for d, needed in zip(dbiases, call.needs_biases(n), strict=True)],
            *(None,) * len(ctx.arguments),
        )

    def eager_forward(
        self, call: LinearCall, x: Tensor, weights: list[Tensor], biases: list[Tensor]
    ) -> tuple[Tensor, ...]:
        with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
            return tuple(self._forward(call, x, weights, biases))

    def eager_backward(
        self, call: LinearCall, grads: list[Tensor], x: Tensor, weights: list[Tensor], factors: Factors
    ) -> tuple[Tensor | None, Sequence[Tensor]]:
        wanted = factors if any(call.needs_weights(len(weights))) else None
        with torch.autocast(x.device.type, enabled=False):
            return self._gradients(call, grads, x, weights, wanted)


def _unwatched(tensors: Sequence[Tensor]) -> bool:
    """Whether nobody wants to see the op or to put something in its place."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return False
    return all(type(t) in (Tensor, nn.Parameter) for t in tensors)


def _save(ctx: Any, call: LinearCall, x: Tensor, weights: list[Tensor]) -> None:
    """Keeps what the backward reads: x for the gradients of the weights, these for that of x, else the shapes alone."""
    ctx.shapes = x.shape, [w.shape for w in weights]
    needs_weight = any(call.needs_weights(len(weights)))
    ctx.save_for_backward(*([x] if needs_weight else []), *(weights if call.needs[0] else []))


def _saved(ctx: Any, call: LinearCall, grads: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """x and the weights; in place of what was not kept, which is not read, a number in its shape."""
    saved, (shape, shapes) = list(ctx.saved_tensors), ctx.shapes
    x = saved.pop(0) if any(call.needs_weights(len(shapes))) else grads[0].new_empty(()).expand(shape)
    return x, saved or [grads[0].new_empty(()).expand(s) for s in shapes]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: LinearOp, handles: Any, arguments: tuple[Any, ...], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        device, cast = tensors[0].device.type, list(tensors)
        if torch.is_autocast_enabled(device):
            cast = list(cast_to_autocast_dtype(torch.get_autocast_dtype(device), tensors))
        x, weights, biases = cast[0], cast[1 : 1 + count], cast[1 + count :]
        # No tensor but what save_for_backward takes care of: the context lives as long as the loss does.
        ctx.op, ctx.handles, ctx.call = op, handles, LinearCall(op.name, *arguments)
        ctx.dtypes = [t.dtype for t in tensors]
        _save(ctx, ctx.call, x, weights)
        return op.eager_forward(ctx.call, x, weights, biases)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return once_differentiable(ctx.op.name, _eager_backward)(ctx, *grads)


def _eager_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    call: LinearCall = ctx.call
    x, weights = _saved(ctx, call, grads)
    n = len(weights)
    dweights: list[Tensor | None] = [None] * n

    def handle(dys: Sequence[Tensor], inputs: Tensor) -> None:
        targets, deferred = ctx.handles

        def finish() -> None:
            for i, needed in enumerate(call.needs_weights(n)):
                dweights[i] = add_to(targets[i], dys[i], inputs) if needed else None

        if deferred is None:
            finish()
        else:
            deferred.push(finish)

    dx, dys = ctx.op.eager_backward(call, list(grads), x, weights, handle)
    dbiases = [dy.sum(0) if needed else None for dy, needed in zip(dys, call.needs_biases(n), strict=False)]
    gradients = [
        d if d is None else d.to(dtype) for d, dtype in zip([dx, *dweights, *dbiases], ctx.dtypes, strict=True)
    ]
    return None, None, None, None, *gradients


def _cast_all(dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Autocast rule: x, weights and biases in the autocast dtype (fp64 stays)."""
    x, weights, biases, *rest = args
    cast = cast_to_autocast_dtype(dtype, (x, *weights, *biases))
    n = len(weights)
    return cast[0], list(cast[1 : 1 + n]), list(cast[1 + n :]), *rest
