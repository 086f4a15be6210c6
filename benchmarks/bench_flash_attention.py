"""flash_attention, causal, against scaled_dot_product_attention: torch's own choice of a backend, which is what a user
gets, and each backend by itself; and flex_attention, compiled. Shapes are [b, h, s, d]; all are given [s, b, h, d]."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.spec import Benchmark, Inputs, Peer, Provider, Shape, Traffic, randn
from parallel_ops.ops import flash_attention


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    b, h, s, d = shape
    return tuple(randn(s, b, h, d, dtype=dtype, device=device) for _ in range(3))


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)


def backend(choice: SDPBackend) -> Provider:
    def forced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(choice):
            return sdpa(q, k, v)

    return forced


def flex() -> Provider:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    masks: dict[tuple[int, torch.device], BlockMask] = {}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key = (q.shape[0], q.device)
        if key not in masks:  # models keep it, so making it is not timed
            masks[key] = create_block_mask(causal, None, None, q.shape[0], q.shape[0], device=str(q.device))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        y: Tensor = compiled(q, k, v, block_mask=masks[key])
        return y.permute(2, 0, 1, 3)

    return run


def shapes(device: str, dtype: torch.dtype, quick: bool) -> list[Shape]:
    if device == "cuda":
        return [(1, 32, 8192, 128)] if quick else [(4, 32, 2048, 128), (1, 32, 8192, 128), (1, 32, 8192, 64)]
    return [(4, 8, 512, 32)] if quick else [(2, 8, 1024, 64), (1, 8, 2048, 32), (1, 8, 4096, 128), (4, 8, 512, 32)]


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    """Attention computes far longer than it moves: a percentage of clone says nothing about how good it is."""
    n = math.prod(shape) * dtype.itemsize
    return Traffic(forward=4 * n, backward=8 * n)  # q, k, v, out; and their gradients


BENCHMARK = Benchmark(
    "flash_attention",
    build,
    flash_attention,
    sdpa,
    traffic,
    shapes,
    tiny=(1, 1, 8, 8),
    peers={
        "sdpa_flash": Peer(partial(backend, SDPBackend.FLASH_ATTENTION), ("cpu", "cuda")),
        "sdpa_efficient": Peer(partial(backend, SDPBackend.EFFICIENT_ATTENTION)),
        "sdpa_cudnn": Peer(partial(backend, SDPBackend.CUDNN_ATTENTION)),
        "sdpa_math": Peer(partial(backend, SDPBackend.MATH), ("cpu", "cuda")),
        "flex": Peer(flex, ("cpu", "cuda")),
    },
)
