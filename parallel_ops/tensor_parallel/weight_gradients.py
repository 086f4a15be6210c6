"""Where the weight gradients of a linear go, and when they are computed.

    dW   = dy^T x                 returned to autograd, in the dtype of W
    M   += dy^T x                 with ``main_grad=M``: accumulated in fp32, nothing is returned to autograd
    later                         with ``deferred=queue``: as above, but when the queue is told to

The last is for zero-bubble pipeline schedules (Qi et al., arXiv:2401.10241): the backward that other stages wait for
computes input gradients only, and the schedule computes weight gradients where it would otherwise idle.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_ops.tensor_parallel._products import add_product


class DeferredWeightGradients:
    """A queue of weight gradients that a backward left undone.

    Each holds the factors that it is made of, the output gradients and inputs of all rows, so memory is freed as the
    queue is computed.
    """

    def __init__(self) -> None:
        self._pending: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def push(self, compute: Callable[[], None]) -> None:
        """Called in a backward: ``compute`` will add one linear's gradients to where they belong."""
        self._pending.append(compute)

    def compute(self, count: int | None = None) -> None:
        """Computes the oldest ``count`` (all of them without it), in the order of the backward.

        Gradients of weights without a ``main_grad`` are added to their ``.grad``; hooks on the weights are not called.
        On CUDA, on the current stream, which is made to wait for the stream of the backward.

        Raises: ValueError for a ``count`` that is negative or more than there are.
        """
        count = len(self) if count is None else count
        if not 0 <= count <= len(self):
            raise ValueError(
                f"DeferredWeightGradients: count must be from 0 to {len(self)}, which are pending, got {count}"
            )
        with torch.no_grad():
            for _ in range(count):
                self._pending.popleft()()


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """``dy^T x``, ``[rows, N]`` and ``[rows, K]`` to ``[N, K]``."""
    return grad.t() @ x


@dataclass(frozen=True)
class Handles:
    """Where the weight gradients of one call go that autograd does not see.

    Attributes:
        main_grads: for each weight what its gradient is added to, if anything.
        leaves: for each weight itself, where its ``.grad`` is added to later.
        deferred: the queue, if any.
    """

    main_grads: list[Tensor | None]
    leaves: list[Tensor | None]
    deferred: DeferredWeightGradients | None

    @property
    def used(self) -> bool:
        return self.deferred is not None or any(m is not None for m in self.main_grads)

    def take(self, dys: Sequence[Tensor], x: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """Adds ``dys[i]^T x`` where it belongs, or queues that; returns what is autograd's after all."""
        if self.deferred is not None:
            self.deferred.push(self._later([dy if n else None for dy, n in zip(dys, needed, strict=True)], x))
            return [None] * len(dys)
        returned: list[Tensor | None] = [None] * len(dys)
        for i, (dy, main_grad) in enumerate(zip(dys, self.main_grads, strict=True)):
            if needed[i] and main_grad is None:
                returned[i] = weight_gradient(dy, x)
            elif needed[i] and main_grad is not None:
                add_product(main_grad, dy, x)
        return returned

    def _later(self, dys: list[Tensor | None], x: Tensor) -> Callable[[], None]:
        backward = torch.cuda.current_stream(x.device) if x.is_cuda else None

        def add() -> None:
            if backward is not None and (now := torch.cuda.current_stream(x.device)) != backward:
                now.wait_stream(backward)
                for factor in (x, *dys):  # else their memory could be given away on the stream that they come from
                    if factor is not None:
                        factor.record_stream(now)
            for dy, main_grad, leaf in zip(dys, self.main_grads, self.leaves, strict=True):
                if dy is not None and main_grad is not None:
                    add_product(main_grad, dy, x)
                elif dy is not None and leaf is not None:
                    _add_to_grad(leaf, dy, x)

        return add


def _add_to_grad(weight: Tensor, dy: Tensor, x: Tensor) -> None:
    """As autograd accumulates: in place, so that who holds on to ``weight.grad`` sees it."""
    if weight.grad is None:
        weight.grad = weight_gradient(dy, x).to(weight.dtype)
    elif weight.grad.dtype is dy.dtype:
        weight.grad.addmm_(dy.t(), x)
    else:
        weight.grad += weight_gradient(dy, x)


def check_handles(
    op: str,
    weights: Sequence[Tensor],
    main_grads: Sequence[Tensor | None] | None,
    deferred: DeferredWeightGradients | None,
) -> Handles:
    """The handles of a call, each fit for its weight."""
    main_grads = [None] * len(weights) if main_grads is None else list(main_grads)
    if len(main_grads) != len(weights):
        raise ValueError(
            f"{op}: main_grad must have one entry for each of the {len(weights)} weights, got {len(main_grads)}"
        )
    if deferred is not None and not isinstance(deferred, DeferredWeightGradients):
        raise TypeError(f"{op}: deferred must be a DeferredWeightGradients, got {type(deferred).__name__}")
    leaves: list[Tensor | None] = [None] * len(weights)
    for i, (main_grad, weight) in enumerate(zip(main_grads, weights, strict=True)):
        if main_grad is not None:
            _check_main_grad(op, main_grad, weight)
        elif deferred is not None and weight.requires_grad:
            if not weight.is_leaf:
                raise ValueError(
                    f"{op}: deferred needs weights that are leaves, or a main_grad; the gradient of a weight that was "
                    "computed from another would reach neither"
                )
            leaves[i] = weight
    handles = Handles(main_grads, leaves, deferred)
    if handles.used and torch.compiler.is_compiling():
        raise ValueError(f"{op}: main_grad and deferred do not work under torch.compile; leave them out there")
    return handles


def _check_main_grad(op: str, main_grad: Tensor, weight: Tensor) -> None:
    """It has its weight's shape and device and is wide enough to accumulate in."""
    if not isinstance(main_grad, Tensor):
        raise TypeError(f"{op}: main_grad must be a tensor, got {type(main_grad).__name__}")
    wide = torch.float64 if weight.dtype is torch.float64 else torch.float32
    if main_grad.dtype is not wide:
        raise TypeError(f"{op}: main_grad must be {wide} for a weight of {weight.dtype}, got {main_grad.dtype}")
    if main_grad.shape != weight.shape:
        raise ValueError(
            f"{op}: main_grad must have the shape of weight, {list(weight.shape)}, got {list(main_grad.shape)}"
        )
    if main_grad.device != weight.device:
        raise ValueError(f"{op}: main_grad is on {main_grad.device}, but weight is on {weight.device}")
class GradientOf:  # SHIM
    def __init__(self, p): self.p = p
