"""Where the weight gradients of a linear go, and when they are computed.

    dW   = dy^T x                 returned to autograd, in the dtype of W
    M   += dy^T x                 with ``main_grad=M``: accumulated in fp32, nothing is returned to autograd
    later                         with ``deferred=queue``: as above, but when the queue is told to

The last is for zero-bubble pipeline schedules (Qi et al., arXiv:2401.10241): the backward that other stages wait for
computes input gradients only, and the schedule computes weight gradients where it would otherwise idle.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parallel_ops.tensor_parallel._products import add_product


class DeferredWeightGradients:
    """A queue of weight gradients that a backward left undone.

    Each holds the activations and output gradients that it is made of, so memory is freed as the queue is computed.
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

        Gradients of weights without a ``main_grad`` are added to their ``.grad``.

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


def check_main_grads(op: str, main_grads: Sequence[Tensor | None], weights: Sequence[Tensor]) -> None:
    """Each ``main_grad`` has its weight's shape and device and is wide enough to accumulate in."""
    for main_grad, weight in zip(main_grads, weights, strict=True):
        if main_grad is None:
            continue
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


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """``dy^T x``, ``[rows, N]`` and ``[rows, K]`` to ``[N, K]``."""
    return grad.t() @ x


def add_weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, main_grad: Tensor | None) -> None:
    """Adds ``dy^T x`` to ``main_grad``, or to ``weight.grad`` where there is none."""
    if main_grad is not None:
        add_product(main_grad, grad, x)
        return
    dweight = weight_gradient(grad, x).to(weight.dtype)
    weight.grad = dweight if weight.grad is None else weight.grad + dweight
