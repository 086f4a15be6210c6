"""vocab_parallel_cross_entropy on one rank: a language model's logits, out of place and in place."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.spec import Benchmark, Inputs, Peer, Provider, Shape, Traffic, randn
from parallel_ops import vocab_parallel_cross_entropy


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    rows, vocab = shape
    return randn(rows, vocab, dtype=dtype, device=device), torch.randint(0, vocab, (rows,), device=device)


def eager(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def inplace() -> Provider:
    return functools.partial(vocab_parallel_cross_entropy, inplace_backward=True)


def liger() -> Provider:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    rows, vocab = shape
    logits = rows * vocab * dtype.itemsize
    # Per row: the target read, max and log sum written; then both read again.
    return Traffic(forward=logits + 16 * rows, backward=2 * logits + 16 * rows)


def shapes(device: str, dtype: torch.dtype, quick: bool) -> list[Shape]:
    if device == "cuda":
        return [(8192, 32000)] if quick else [(8192, 32000), (8192, 131072)]
    return [(256, 32000)] if quick else [(2048, 32000)]


BENCHMARKS = (
    Benchmark(
        "vocab_parallel_cross_entropy", build, vocab_parallel_cross_entropy, eager, traffic, shapes, tiny=(8, 64),
        # A call that writes over the logits has one backward only: forward and backward together.
        peers={
            "inplace": Peer(inplace, devices=("cpu", "cuda"), directions=("full",)),
            "liger": Peer(liger, directions=("full",)),
        },
    ),
)  # fmt: skip
