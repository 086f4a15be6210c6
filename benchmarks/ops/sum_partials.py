"""sum_partials: the parts that eight ranks computed of this rank's rows, added in rank order."""

import math

import torch

from benchmarks.harness.spec import Benchmark, Inputs, Shape, Traffic
from parallel_ops.comm.sum_partials import sum_partials, sum_partials_reference

RANKS = 8


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    return (torch.randn((RANKS, *shape), dtype=dtype, device=device),)


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    return Traffic(forward=(RANKS + 1) * math.prod(shape) * dtype.itemsize, backward=0)


def shapes(device: str, dtype: torch.dtype, quick: bool) -> list[Shape]:
    """A rank's part of 8,192 rows on a GPU; of the size of a first-level cache's multiple on a CPU."""
    if device == "cuda":
        return [(1024, h) for h in ((8192,) if quick else (4096, 8192, 12288))]
    return [((1 << 23) // (RANKS * 4096 * dtype.itemsize), 4096)]


BENCHMARKS = (
    Benchmark(
        "sum_partials", build, sum_partials, sum_partials_reference, traffic, shapes, (2, 8), directions=("forward",)
    ),
)
