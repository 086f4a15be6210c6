"""rms_norm: the kernels that it shares with layer_norm, without mean and bias."""

from torch import Tensor

from parallel_ops.triton_kernels.norms import backward as _norm_backward
from parallel_ops.triton_kernels.norms import forward as _norm_forward


def forward(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, y: Tensor, total: Tensor, rstd: Tensor, *,
    eps: float, zero_centered: bool,
) -> None:  # fmt: skip
    """``y`` and ``rstd`` of ``x``, or of ``x + residual``, which goes to ``total``."""
    _norm_forward.forward(x, weight, None, residual, y, total, None, rstd, eps=eps, zero_centered=zero_centered)


def backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor,
    dx: Tensor | None, narrow_dx: Tensor | None, dweight: Tensor | None, *, zero_centered: bool,
) -> None:  # fmt: skip
    """Gradients of the normalised tensor, a second copy in a narrower dtype if given, and of the weight if given.

    Without ``dx`` that of the weight alone, whose value is not read then.
    """
    _norm_backward.backward(
        grad, grad_sum, x, weight, None, rstd, dx, narrow_dx, dweight, None, zero_centered=zero_centered
    )
