"""Norms of activations [s, b, h]: ``layer_norm`` with weight and bias, ``rms_norm`` with a weight."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.spec import Benchmark, Inputs, Peer, Provider, Shape, Traffic, hidden_shapes, randn
from parallel_ops.ops import layer_norm, rms_norm


def with_bias(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    return *with_weight(shape, dtype, device), randn(shape[-1], dtype=dtype, device=device)


def with_weight(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    return randn(*shape, dtype=dtype, device=device), randn(shape[-1], dtype=dtype, device=device)


def layer_norm_eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm_eager(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()  # as Llama has it
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def liger_layer_norm() -> Provider:
    from liger_kernel.ops import LigerLayerNormFunction

    return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, 1e-5)


def liger_rms_norm() -> Provider:
    from liger_kernel.ops import LigerRMSNormFunction

    # Offset 0, Llama's casting, and not in place: in place it would write the gradient over dy.
    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False)


def layer_norm_traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    n, h = math.prod(shape), shape[-1]
    statistics = 2 * 4 * (n // h)  # mean and rstd, fp32
    return Traffic(
        forward=(2 * n + 2 * h) * dtype.itemsize + statistics,  # reads x and the parameters, writes y
        backward=(3 * n + 3 * h) * dtype.itemsize + statistics,  # reads dy, x and weight, writes dx, dweight and dbias
    )


def rms_norm_traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    n, h = math.prod(shape), shape[-1]
    statistics = 4 * (n // h)  # rstd, fp32
    return Traffic(
        forward=(2 * n + h) * dtype.itemsize + statistics,  # reads x and weight, writes y
        backward=(3 * n + 2 * h) * dtype.itemsize + statistics,  # reads dy, x and weight, writes dx and dweight
    )


BENCHMARKS = (
    Benchmark("layer_norm", with_bias, layer_norm, layer_norm_eager, layer_norm_traffic, hidden_shapes, (2, 2, 8),
              peers={"liger": Peer(liger_layer_norm)}),
    Benchmark("rms_norm", with_weight, rms_norm, rms_norm_eager, rms_norm_traffic, hidden_shapes, (2, 2, 8),
              peers={"liger": Peer(liger_rms_norm)}),
)  # fmt: skip
