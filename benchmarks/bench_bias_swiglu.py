"""bias_swiglu: the gate and up projections in one buffer, without a bias, as Llama-style models have it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.spec import Benchmark, Inputs, Peer, Provider, Shape, Traffic, hidden_shapes, randn
from parallel_ops.ops import bias_swiglu


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    return (randn(*shape, dtype=dtype, device=device),)


def eager(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def liger() -> Provider:
    # The kernel that reads both halves from one buffer; the two-tensor one would first copy each half.
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    def swiglu(x: Tensor) -> Tensor:
        y: Tensor = LigerFusedGateUpSiLUMulFunction.apply(x.view(-1, x.shape[-1]), False)
        return y.view(*x.shape[:-1], -1)

    return swiglu


def shapes(device: str, dtype: torch.dtype, quick: bool) -> list[Shape]:
    """[s, b, 2h], so that y is [s, b, h] and no tensor is smaller than those of the other ops."""
    return [(*leading, 2 * h) for *leading, h in hidden_shapes(device, dtype, quick)]


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    n = math.prod(shape)  # x: gate and up; y is half as large
    return Traffic(
        forward=(n + n // 2) * dtype.itemsize,  # reads x, writes y
        backward=(n // 2 + n + n) * dtype.itemsize,  # reads dy and x, writes dx
    )


BENCHMARK = Benchmark(
    "bias_swiglu", build, bias_swiglu, eager, traffic, shapes, tiny=(2, 2, 8), peers={"liger": Peer(liger)}
)
