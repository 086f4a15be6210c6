"""Linears and norms for Megatron's layer specs.

They are Megatron's own classes with another forward, so constructor arguments, attributes of parameters, checkpoints
and the result ``(output, bias)`` are those of the installed version. What the ops do not support (experts,
Megatron-FSDP, offloading) runs Megatron's code.
"""

import copy
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from parallel_ops import ops
from parallel_ops._internal.distributed.groups import GradReduce
from parallel_ops.comm import set_consistency_checks
from parallel_ops.integrations.megatron._options import given
from parallel_ops.integrations.megatron.weight_gradient import MainGrad
from parallel_ops.tensor_parallel import all_gather_linear, linear_reduce_scatter

# Options of Megatron's linears that the ops support, or that ``_covered`` reads of the linear. Others are the buffer of
# deferred gradients, and those of newer versions.
_OPTIONS = {
    "bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "tp_group", "gtp_remat_size",
}  # fmt: skip


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """Megatron's, with ``all_gather_linear`` under sequence parallelism: the matmul overlaps with the gather.

    Without sequence parallelism Megatron's own code runs, which overlaps the all-reduce of the input's gradient with
    the weight's gradient.
    """

    grad_reduce: GradReduce = "fp32"

    def __init__(self, *args: Any, config: Any, embedding_activation_buffer: Any = None, **kwargs: Any) -> None:
        if config.defer_embedding_wgrad_compute and embedding_activation_buffer is None:
            # The flag is for the output layer, which has the buffer; Megatron's hidden layers would fail with it.
            config = copy.copy(config)
            config.defer_embedding_wgrad_compute = False
        super().__init__(*args, config=config, embedding_activation_buffer=embedding_activation_buffer, **kwargs)
        _check_first_calls(self)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or given(kwargs, _OPTIONS) or not kwargs.get("sequence_parallel") or not _covered(self, weight):
            return super()._forward_impl(input, weight, *args, **kwargs)
        return all_gather_linear(
            input, weight, kwargs.get("bias"), group=self.tp_group, grad_reduce=self.grad_reduce,
            main_grad=_main_grad(self, weight),
        )  # fmt: skip


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """Megatron's, with ``linear_reduce_scatter`` under sequence parallelism: they overlap."""

    grad_reduce: GradReduce = "fp32"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_first_calls(self)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.sequence_parallel or self.explicit_expert_comm or not _covered(self, self.weight):
            return super().forward(input_)
        main_grad = _main_grad(self, self.weight)
        output = linear_reduce_scatter(
            input_, self.weight, None if self.skip_bias_add else self.bias, group=self.tp_group,
            grad_reduce=self.grad_reduce, main_grad=main_grad,
            bias_gradient="partial",  # Megatron sums the gradients of parameters tagged sequence_parallel
        )  # fmt: skip
        return output, self.bias if self.skip_bias_add else None


class BackendColumnParallelLinear(ColumnParallelLinear):
    """``ColumnParallelLinear`` whose input's gradient the group's backend sums, as in Megatron's own."""

    grad_reduce = "backend"


class BackendRowParallelLinear(RowParallelLinear):
    """``RowParallelLinear`` whose output the group's backend sums, as in Megatron's own."""

    grad_reduce = "backend"


def _check_first_calls(linear: Any) -> None:
    """Compares only the first call of a kind between ranks: a message a call is slow in small models on CPUs."""
    if linear.tp_group is not None:
        set_consistency_checks(linear.tp_group, "first")


def _covered(linear: Any, weight: Tensor) -> bool:
    offloading = linear.config._cpu_offloading_context
    sharded = hasattr(weight, "__fsdp_param__") or getattr(linear, "gtp_remat_size", 1) > 1
    return not sharded and not (offloading is not None and offloading.inside_context)


def _main_grad(linear: Any, weight: Tensor) -> MainGrad | None:
    fused = linear.gradient_accumulation_fusion and weight.requires_grad and hasattr(weight, "main_grad")
    return MainGrad(weight) if fused else None


class _Tagged(torch.nn.Module):
    """A norm of torch whose parameters are tagged ``sequence_parallel`` if their gradients are this rank's only.

    Results have the parameters' dtype, in which the next linear is, also where the residual stream is in fp32.
    """

    def __init__(self, hidden_size: int, eps: float, *, sequence_parallel: bool, zero_centered: bool) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered = zero_centered
        if zero_centered:
            torch.nn.init.zeros_(self.get_parameter("weight"))
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


class LayerNorm(_Tagged, torch.nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        # Megatron's Apex norm adds one to the weight too, in another kernel.
        weight = self.weight + 1 if self.zero_centered else self.weight
        return ops.layer_norm(x, weight, self.bias, self.eps).to(weight.dtype)


class RMSNorm(_Tagged, torch.nn.RMSNorm):
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered).to(self.weight.dtype)


class Norm:
    """Builds the norm of a Megatron configuration, as ``WrappedTorchNorm`` does."""

    def __new__(  # type: ignore[misc]
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> LayerNorm | RMSNorm:
        kinds: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        if config.normalization not in kinds:
            raise ValueError(f"Norm: normalization must be one of {', '.join(kinds)}, got {config.normalization!r}")
        return kinds[config.normalization](
            hidden_size,
            eps,
            sequence_parallel=config.sequence_parallel,
            zero_centered=config.layernorm_zero_centered_gamma,
        )
