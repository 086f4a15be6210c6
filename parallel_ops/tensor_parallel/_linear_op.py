"""What all_gather_linear and linear_reduce_scatter share: checks, registration, autograd.

Each op gives two functions of a ``LinearCall``: its forward, and its gradients, which hands the factors of the weight
gradients to a callback as soon as it has them. What the callback does with them is decided here: multiply them for
autograd, add the product to a ``main_grad``, or queue that for later. The first way is a registered op, opaque to
``torch.compile``; the other two change tensors that autograd does not know of, and are eager only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm._agreement import Call, agree, announcing_failure
from parallel_ops.comm._group import group_name, resolve_group
from parallel_ops.comm.transport import Transport
from parallel_ops.ops._registration import cast_to_autocast_dtype, once_differentiable, register
from parallel_ops.tensor_parallel import _overlap_plan as plan
from parallel_ops.tensor_parallel._linear_checks import check_linear
from parallel_ops.tensor_parallel.transports import transport_of
from parallel_ops.tensor_parallel.weight_gradients import (
    DeferredWeightGradients,
    add_weight_gradient,
    check_main_grads,
    weight_gradient,
)

# (output gradients, inputs): matrices of the same rows, of which the weight gradients are products.
Factors = Callable[[Sequence[Tensor], Tensor], None]


def flat(t: Tensor) -> Tensor:
    """``[..., N]`` as a contiguous matrix."""
    return t.reshape(-1, t.shape[-1]).contiguous()


@dataclass(frozen=True)
class LinearCall:
    """The arguments of the op that are not tensors."""

    op: str
    group: str | None
    sizes: list[int]  # of the sharded dimension, in rank order
    overlap: int
    needs: list[bool]  # of x, each weight and each bias: whether a gradient is wanted

    def needs_weights(self, count: int) -> list[bool]:
        return self.needs[1 : 1 + count]

    def needs_biases(self, count: int) -> list[bool]:
        return self.needs[1 + count :]

    def agree(self, x: Tensor, same: tuple[object, ...], shape: str, weights: Sequence[Tensor]) -> None:
        """The ranks make the same call: else all raise.

        Where a measurement chooses the pieces, they must have weights of one shape too: on what is kept of it by shape
        they would otherwise differ, and wait for each other.
        """
        if self.group is None:
            return
        group = resolve_group(self.group)
        over = transport_of(group).capabilities.name
        # Which parameters want gradients decides what a backward sends.
        options: tuple[object, ...] = (tuple(self.sizes), self.overlap, tuple(self.needs), over)
        text = f"{shape} {x.dtype}, sizes={self.sizes}, overlap={self.overlap}, gradients={self.needs} over {over}"
        if self.overlap == plan.AUTO and x.is_cuda:
            shapes = [tuple(w.shape) for w in weights]
            options, text = (*options, *shapes), f"{text}, weights of {shapes}"
        agree(group, Call(self.op, (x.dtype, *same, *options), text), x.device)

    def transport(self) -> Transport | None:
        return None if self.group is None else transport_of(resolve_group(self.group))

    def rows(self, inner: Sequence[int]) -> list[int]:
        """The rows of every rank's matrix, for a tensor ``[s, *inner, N]``."""
        per_index = 1
        for n in inner:
            per_index *= n
        return [size * per_index for size in self.sizes]

    def task(
        self, phase: plan.Phase, transport: Transport, rows: Sequence[int], columns: int, inner: int, dtype: torch.dtype
    ) -> plan.Task:
        """A product ``[sum(rows), inner] @ [inner, columns]`` whose input is gathered, or whose output is scattered."""
        sent = {"gather": max(rows) * (transport.size - 1) * inner, "scatter": (sum(rows) - min(rows)) * columns}
        return plan.Task(
            phase=phase,
            rows=sum(rows),
            columns=columns,
            inner=inner,
            sent=sent[phase] * dtype.itemsize,
            size=transport.size,
            dtype=dtype,
            transport=transport.capabilities.name,
        )

    def pieces(self, task: plan.Task, device: torch.device, run: Callable[[int], object]) -> int:
        """How many messages for each shard; ``run`` does the task with that many, to be timed."""
        if self.overlap > 0:
            return self.overlap
        if self.overlap != plan.AUTO or self.group is None:
            return plan.OFF
        return plan.choose(task, device, resolve_group(self.group), run)

    def bulk(self, device: torch.device) -> bool:
        """Whether whole collectives go behind whole products. On a GPU it costs nothing; on a CPU it gains nothing."""
        return self.overlap != plan.OFF and not (self.overlap == plan.AUTO and device.type == "cpu")


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
        main_grads: list[Tensor | None] | None,
        deferred: DeferredWeightGradients | None,
        group: ProcessGroup | None,
        overlap: plan.Overlap,
        split: Callable[[], list[int]],
    ) -> list[Tensor]:
        """Checks everything, ``split()`` (the sizes) last, and runs."""
        group_id = group_name(self.name, group)
        with announcing_failure(self.name, group_id, x, *weights):
            check_linear(self.name, x, weights, biases, group)
            handles = _Handles(main_grads or [None] * len(weights), deferred)
            handles.check(self.name, weights)
            pieces, sizes = plan.encode(self.name, overlap), split()
        grad = torch.is_grad_enabled()
        needs = [grad and t.requires_grad for t in (x, *weights, *biases)]
        arguments = group_id, sizes, pieces, needs
        if grad and handles.used:
            return list(_Handled.apply(self, handles, arguments, len(weights), x, *weights, *biases))
        return self._op(x, weights, biases, *arguments)

    def _run(self, x: Tensor, weights: list[Tensor], biases: list[Tensor], *arguments: Any) -> list[Tensor]:
        return self._forward(LinearCall(self.name, *arguments), x, weights, biases)

    def _backward(self, x: Tensor, grads: list[Tensor], weights: list[Tensor], *arguments: Any) -> tuple[Any, ...]:
        call, n = LinearCall(self.name, *arguments), len(weights)
        dweights = [w.new_empty(0) for w in weights]

        def multiply(dys: Sequence[Tensor], inputs: Tensor) -> None:
            for i, needed in enumerate(call.needs_weights(n)):
                if needed:
                    dweights[i] = weight_gradient(dys[i], inputs)

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
        ctx.save_for_backward(x, *weights)

    def _autograd(self, ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        call = LinearCall(self.name, *ctx.arguments)
        dx, dweights, dbiases = self._backward_op(x, grads, weights, *ctx.arguments)
        n = len(weights)
        return (
            dx if call.needs[0] else None,
            [d if needed else None for d, needed in zip(dweights, call.needs_weights(n), strict=True)],
            [d if needed else None for d, needed in zip(dbiases, call.needs_biases(n), strict=True)],
            *(None,) * len(ctx.arguments),
        )

    def handled_forward(
        self, arguments: tuple[Any, ...], x: Tensor, weights: list[Tensor], biases: list[Tensor]
    ) -> list[Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            return self._run(x, weights, biases, *arguments)

    def handled_backward(
        self, arguments: tuple[Any, ...], grads: list[Tensor], x: Tensor, weights: list[Tensor], factors: Factors
    ) -> tuple[Tensor | None, Sequence[Tensor]]:
        call = LinearCall(self.name, *arguments)
        wanted = factors if any(call.needs_weights(len(weights))) else None
        return self._gradients(call, grads, x, weights, wanted)


@dataclass(frozen=True)
class _Handles:
    """Where weight gradients go that autograd does not see."""

    main_grads: list[Tensor | None]
    deferred: DeferredWeightGradients | None

    @property
    def used(self) -> bool:
        return self.deferred is not None or any(m is not None for m in self.main_grads)

    def check(self, op: str, weights: list[Tensor]) -> None:
        if len(self.main_grads) != len(weights):
            raise ValueError(
                f"{op}: main_grad must have one entry for each of the {len(weights)} weights, "
                f"got {len(self.main_grads)}"
            )
        check_main_grads(op, self.main_grads, weights)
        if self.deferred is not None and not isinstance(self.deferred, DeferredWeightGradients):
            raise TypeError(f"{op}: deferred must be a DeferredWeightGradients, got {type(self.deferred).__name__}")
        for weight, main_grad in zip(weights, self.main_grads, strict=True):
            if self.deferred is not None and main_grad is None and weight.requires_grad and not weight.is_leaf:
                raise ValueError(
                    f"{op}: deferred needs weights that are leaves, or a main_grad; the gradient of a weight that was "
                    "computed from another would reach neither"
                )
        if self.used and torch.compiler.is_compiling():
            raise ValueError(f"{op}: main_grad and deferred do not work under torch.compile; leave them out there")


class _Handled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: LinearOp, handles: _Handles, arguments: tuple[Any, ...], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        device = tensors[0].device.type
        ctx.op, ctx.handles, ctx.arguments, ctx.tensors, ctx.count = op, handles, arguments, tensors, count
        cast = list(tensors)
        if torch.is_autocast_enabled(device):
            cast = list(cast_to_autocast_dtype(torch.get_autocast_dtype(device), tensors))
        x, weights, biases = cast[0], cast[1 : 1 + count], cast[1 + count :]
        ctx.save_for_backward(x, *weights)
        return tuple(op.handled_forward(arguments, x, weights, biases))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return once_differentiable(ctx.op.name, _handled_backward)(ctx, *grads)


def _handled_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    x, *weights = ctx.saved_tensors
    needs, n = ctx.arguments[-1], ctx.count
    handles: _Handles = ctx.handles

    def keep(dys: Sequence[Tensor], inputs: Tensor) -> None:
        def add() -> None:
            for i in range(n):
                if needs[1 + i]:
                    add_weight_gradient(dys[i], inputs, ctx.tensors[1 + i], handles.main_grads[i])

        if handles.deferred is None:
            add()
        else:
            handles.deferred.push(add)

    dx, dys = ctx.op.handled_backward(ctx.arguments, list(grads), x, weights, keep)
    dbiases = [
        dy.sum(0).to(bias.dtype) if needed else None
        for dy, bias, needed in zip(dys, ctx.tensors[1 + n :], needs[1 + n :], strict=False)
    ]
    return None, None, None, None, None if dx is None else dx.to(ctx.tensors[0].dtype), *(None,) * n, *dbiases


def _cast_all(dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Autocast rule: x, weights and biases in the autocast dtype (fp64 stays)."""
    x, weights, biases, *rest = args
    cast = cast_to_autocast_dtype(dtype, (x, *weights, *biases))
    n = len(weights)
    return cast[0], list(cast[1 : 1 + n]), list(cast[1 + n :]), *rest
