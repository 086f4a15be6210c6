"""scaled_causal_softmax: the softmax kernels with each query's visible keys instead of a mask."""

from torch import Tensor

from parallel_ops.triton_kernels import _softmax

NO_MASK = (1, 1, 0, 0, 0, 0)


def forward(scores: Tensor, y: Tensor, *, scale: float, window: int | None) -> None:
    """``y = softmax(scale * scores)`` over the keys that each query sees, zero elsewhere; ``y`` is contiguous."""
    if scores.numel() == 0:
        return
    _softmax.launch_forward(scores, None, NO_MASK, y, scale, kind="none", causal=True, window=window)


def backward(grad: Tensor, y: Tensor, dx: Tensor, *, scale: float, window: int | None) -> None:
    """``dx = scale * y * (grad - sum(grad * y))`` over the keys that each query sees; ``dx`` is contiguous."""
    _softmax.launch_backward(grad, y, dx, scale, causal=True, window=window)
