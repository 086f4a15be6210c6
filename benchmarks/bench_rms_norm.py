"""rms_norm: activations [s, b, h] with a weight."""

import math

import torch
from torch import Tensor

from benchmarks.spec import Benchmark, Inputs, Peer, Provider, Shape, Traffic, hidden_shapes, randn
from parallel_ops.ops import rms_norm


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    return randn(*shape, dtype=dtype, device=device), randn(shape[-1], dtype=dtype, device=device)


def eager(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()  # as Llama has it
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def liger() -> Provider:
    from liger_kernel.ops import LigerRMSNormFunction

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        # Offset 0, Llama's casting, and not in place: in place it would write the gradient over dy.
        y: Tensor = LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False)
        return y

    return norm


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    n, h = math.prod(shape), shape[-1]
    statistics = 4 * (n // h)  # rstd, fp32
    return Traffic(
        forward=(2 * n + h) * dtype.itemsize + statistics,  # reads x and weight, writes y
        backward=(3 * n + 2 * h) * dtype.itemsize + statistics,  # reads dy, x and weight, writes dx and dweight
    )


BENCHMARK = Benchmark(
    "rms_norm", build, rms_norm, eager, traffic, hidden_shapes, tiny=(2, 2, 8), peers={"liger": Peer(liger)}
)
