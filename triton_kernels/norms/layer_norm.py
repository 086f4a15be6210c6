"""layer_norm: the kernels that it shares with rms_norm, with the mean subtracted and a bias."""

from torch import Tensor

from parallel_ops.triton_kernels.norms import backward as _norm_backward
from parallel_ops.triton_kernels.norms import forward as _norm_forward


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    y: Tensor, total: Tensor, mean: Tensor, rstd: Tensor, *, eps: float, zero_centered: bool,
) -> None:  # fmt: skip
    """``y``, ``mean`` and ``rstd`` of ``x``, or of ``x + residual``, which goes to ``total``."""
    _norm_forward.forward(x, weight, bias, residual, y, total, mean, rstd, eps=eps, zero_centered=zero_centered)


def backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    dx: Tensor | None, narrow_dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, *, zero_centered: bool,
) -> None:  # fmt: skip
    """Gradients of the normalised tensor, a second copy in a narrower dtype if given, and of the given parameters.

    Without ``dx`` those of the parameters alone, whose values are not read then.
    """
    _norm_backward.backward(
        grad, grad_sum, x, weight, mean, rstd, dx, narrow_dx, dweight, dbias, zero_centered=zero_centered
    )
