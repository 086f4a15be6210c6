"""vocab_parallel_linear_cross_entropy on one rank, against logits and F.cross_entropy."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.spec import Benchmark, Inputs, Peer, Provider, Shape, Traffic, randn
from parallel_ops import vocab_parallel_linear_cross_entropy


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    rows, vocab, size = shape
    hidden = randn(rows, size, dtype=dtype, device=device)
    weight = (0.05 * randn(vocab, size, dtype=dtype, device=device)).detach().requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (rows,), device=device)


def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def pytorch() -> Provider:
    from torch.nn import LinearCrossEntropyOptions  # torch 2.13

    options = LinearCrossEntropyOptions()
    return lambda hidden, weight, target: F.linear_cross_entropy(hidden, weight, target, options=options)


def liger() -> Provider:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy


def cce() -> Provider:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    rows, vocab, size = shape
    inputs = (rows + vocab) * size * dtype.itemsize
    return Traffic(forward=inputs, backward=2 * inputs)  # time goes into the matmuls, not into these


def shapes(device: str, dtype: torch.dtype, quick: bool) -> list[Shape]:
    """(rows, vocabulary, hidden size)"""
    if device == "cuda":
        return [(4096, 32000, 2048)] if quick else [(8192, 131072, 4096)]
    return [((512 if quick else 4096) * 4 // dtype.itemsize, 32000, 256)]


BENCHMARKS = (
    Benchmark(
        "vocab_parallel_linear_cross_entropy", build, vocab_parallel_linear_cross_entropy, eager, traffic, shapes,
        tiny=(8, 64, 16), directions=("full",),
        peers={"torch": Peer(pytorch, devices=("cpu", "cuda")), "liger": Peer(liger), "cce": Peer(cce)},
    ),
)  # fmt: skip
