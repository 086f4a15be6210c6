"""Activations of MLPs: ``bias_gelu``, ``bias_swiglu``, ``silu_mul``, and ``silu_mul`` with the options of gpt-oss."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.spec import Benchmark, Inputs, Peer, Provider, Shape, Traffic, hidden_shapes, randn
from parallel_ops.ops import bias_gelu, bias_swiglu, silu_mul

_ALPHA, _LIMIT = 1.702, 7.0  # gpt-oss


def with_bias(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    return randn(*shape, dtype=dtype, device=device), randn(shape[-1], dtype=dtype, device=device)


def one_buffer(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    return (randn(*shape, dtype=dtype, device=device),)


def two_tensors(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    return randn(*shape, dtype=dtype, device=device), randn(*shape, dtype=dtype, device=device)


def gelu_eager(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def swiglu_eager(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul_eager(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gpt_oss_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu_mul(gate, up, alpha=_ALPHA, limit=_LIMIT, up_offset=1.0)


def gpt_oss_eager(gate: Tensor, up: Tensor) -> Tensor:
    """Transformers' composite."""
    gate, up = gate.clamp(max=_LIMIT), up.clamp(min=-_LIMIT, max=_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * _ALPHA))


def liger_swiglu() -> Provider:
    # The kernel that reads both halves from one buffer; the two-tensor one would first copy each half.
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    def swiglu(x: Tensor) -> Tensor:
        y: Tensor = LigerFusedGateUpSiLUMulFunction.apply(x.view(-1, x.shape[-1]), False)
        return y.view(*x.shape[:-1], -1)

    return swiglu


def liger_silu_mul() -> Provider:
    from liger_kernel.ops import LigerSiLUMulFunction

    apply: Provider = LigerSiLUMulFunction.apply
    return apply


def gelu_traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    n, h = math.prod(shape), shape[-1]
    return Traffic(
        forward=(2 * n + h) * dtype.itemsize,  # reads x and bias, writes y
        backward=(3 * n + 2 * h) * dtype.itemsize,  # reads dy, x and bias, writes dx and dbias
    )


def swiglu_traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    n = math.prod(shape)  # x: gate and up; y is half as large
    return Traffic(
        forward=(n + n // 2) * dtype.itemsize,  # reads x, writes y
        backward=(n // 2 + n + n) * dtype.itemsize,  # reads dy and x, writes dx
    )


def silu_mul_traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    n = math.prod(shape) * dtype.itemsize
    return Traffic(forward=3 * n, backward=5 * n)  # reads gate and up, writes y; reads dy too, writes both gradients


def swiglu_shapes(device: str, dtype: torch.dtype, quick: bool) -> list[Shape]:
    """[s, b, 2h], so that y is [s, b, h] and no tensor is smaller than those of the other ops."""
    return [(*leading, 2 * h) for *leading, h in hidden_shapes(device, dtype, quick)]


TINY = (2, 2, 8)
BENCHMARKS = (
    Benchmark("bias_gelu", with_bias, bias_gelu, gelu_eager, gelu_traffic, hidden_shapes, TINY),
    Benchmark("bias_swiglu", one_buffer, bias_swiglu, swiglu_eager, swiglu_traffic, swiglu_shapes, TINY,
              peers={"liger": Peer(liger_swiglu)}),
    Benchmark("silu_mul", two_tensors, silu_mul, silu_mul_eager, silu_mul_traffic, hidden_shapes, TINY,
              peers={"liger": Peer(liger_silu_mul)}),
    Benchmark("gpt_oss_swiglu", two_tensors, gpt_oss_swiglu, gpt_oss_eager, silu_mul_traffic, hidden_shapes, TINY),
)  # fmt: skip
