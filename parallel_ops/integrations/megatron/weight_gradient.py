"""Weight gradients accumulated into Megatron's ``main_grad``.

    main_grad += dy^T x        main_grad float32, or of the dtype of dy and x

``extension`` replaces Apex's module ``fused_weight_gradient_mlp_cuda``, which Megatron's linears and the deferred
gradients of its embedding call. ``MainGrad`` does the same for this package's linears.
"""

from types import ModuleType
from typing import Any

from torch import Tensor

from parallel_ops._internal.gradients.weight_gradients import Accumulator, add_product


def wgrad_gemm_accum_fp32(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """``main_grad += grad_output^T input``.

    Args:
        input: ``[..., K]``. grad_output: ``[..., N]``, the same rows and dtype.
        main_grad: ``[N, K]``, float32 (or the dtype of both). Nothing is rounded on the way.
    """
    add_product(main_grad, grad_output.detach().flatten(0, -2), input.detach().flatten(0, -2))


# Apex has two kernels, by the dtype of main_grad.
wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32

extension = ModuleType("fused_weight_gradient_mlp_cuda", __doc__)
extension.__dict__.update(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32, wgrad_gemm_accum_fp16=wgrad_gemm_accum_fp16)


class MainGrad(Accumulator):
    """The ``main_grad`` of a Megatron parameter, with what Megatron's data parallelism expects beside it.

    If the parameter has ``grad_added_to_main_grad``, it is set, and autograd gets a dummy gradient, so that the hooks
    that start the reduction run. The dummy is zeros if the parameter has ``zero_out_wgrad`` set.
    """

    def __init__(self, weight: Any) -> None:
        self._weight, self._main_grad = weight, weight.main_grad

    def add(self, dz: Tensor, h: Tensor, offs: Tensor | None = None) -> Tensor | None:
        add_product(self._main_grad, dz, h, offs)
        if not hasattr(self._weight, "grad_added_to_main_grad"):
            return None
        self._weight.grad_added_to_main_grad = True
        shape = self._main_grad.shape
        return h.new_zeros(shape) if getattr(self._weight, "zero_out_wgrad", False) else h.new_empty(shape)
