"""layer_norm: activations [s, b, h] with a weight and a bias."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.spec import Benchmark, Inputs, Peer, Provider, Shape, Traffic, hidden_shapes, randn
from parallel_ops.ops import layer_norm


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    x = randn(*shape, dtype=dtype, device=device)
    return x, randn(shape[-1], dtype=dtype, device=device), randn(shape[-1], dtype=dtype, device=device)


def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def liger() -> Provider:
    from liger_kernel.ops import LigerLayerNormFunction

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y: Tensor = LigerLayerNormFunction.apply(x, weight, bias, 1e-5)
        return y

    return norm


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    n, h = math.prod(shape), shape[-1]
    statistics = 2 * 4 * (n // h)  # mean and rstd, fp32
    return Traffic(
        forward=(2 * n + 2 * h) * dtype.itemsize + statistics,  # reads x and the parameters, writes y
        backward=(3 * n + 3 * h) * dtype.itemsize + statistics,  # reads dy, x and weight, writes dx, dweight and dbias
    )


BENCHMARK = Benchmark(
    "layer_norm", build, layer_norm, eager, traffic, hidden_shapes, tiny=(2, 2, 8), peers={"liger": Peer(liger)}
)
