"""silu_mul: the gate and up projections in two tensors, as Hugging Face's models and Liger have them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.spec import Benchmark, Inputs, Peer, Provider, Shape, Traffic, hidden_shapes, randn
from parallel_ops.ops import silu_mul


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    return randn(*shape, dtype=dtype, device=device), randn(*shape, dtype=dtype, device=device)


def eager(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def liger() -> Provider:
    from liger_kernel.ops import LigerSiLUMulFunction

    apply: Provider = LigerSiLUMulFunction.apply
    return apply


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    n = math.prod(shape) * dtype.itemsize
    return Traffic(forward=3 * n, backward=5 * n)  # reads gate and up, writes y; reads dy too, writes both gradients


BENCHMARK = Benchmark(
    "silu_mul", build, silu_mul, eager, traffic, hidden_shapes, tiny=(2, 2, 8), peers={"liger": Peer(liger)}
)
