"""layer_norm: the kernels that it shares with rms_norm, with the mean subtracted and a bias."""

from torch import Tensor

from parallel_ops.triton_kernels import _norm_backward, _norm_forward


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
    y: Tensor, total: Tensor, mean: Tensor, rstd: Tensor, *, eps: float, zero_centered: bool,
) -> None:  # fmt: skip
    """``y``, ``mean`` and ``rstd`` of ``x``, or of ``x + residual``, which goes to ``total``."""
    _norm_forward.forward(x, weight, bias, residual, y, total, mean, rstd, eps=eps, zero_centered=zero_centered)


def backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor,
    dx: Tensor, dweight: Tensor, dbias: Tensor, *, zero_centered: bool,
) -> None:  # fmt: skip
    """Gradients of what was normalised, the weight and, unless ``dbias`` is empty, the bias."""
    bias = dbias if dbias.shape == dweight.shape else None
    _norm_backward.backward(grad, grad_sum, x, weight, mean, rstd, dx, dweight, bias, zero_centered=zero_centered)
