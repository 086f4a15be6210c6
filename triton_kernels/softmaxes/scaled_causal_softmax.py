"""scaled_causal_softmax: the softmax kernels with each query's visible keys instead of a mask."""

from torch import Tensor

from parallel_ops.triton_kernels.softmaxes import launchers as _softmax


def forward(scores: Tensor, sink: Tensor | None, y: Tensor, share: Tensor, *, scale: float, window: int | None) -> None:
    """``y = softmax(scale * scores)`` over the keys that each query sees, zero elsewhere; ``y`` is contiguous.

    ``share`` gets each row's probability of ``sink``, where there is one.
    """
    if scores.numel() == 0:
        return
    _softmax.launch_forward(
        scores, None, _softmax.NO_MASK, sink, y, share, scale, kind="none", causal=True, window=window
    )


def backward(
    grad: Tensor, y: Tensor, share: Tensor | None, dx: Tensor, sink_grad: Tensor | None, *,
    scale: float, window: int | None,
) -> None:  # fmt: skip
    """``dx`` of the scores, over the keys that each query sees, and each row's gradient of its sink."""
    _softmax.launch_backward(grad, y, share, dx, sink_grad, scale, causal=True, window=window)
