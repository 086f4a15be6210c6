"""flash_attention, causal, against scaled_dot_product_attention: torch's own choice of a backend, which is what a user
gets, and each backend by itself; and flex_attention, compiled. On a GPU flash_attention takes torch's kernels where it
can; "triton" are this package's own. Beside them flash_attention with less to do: a window of
a quarter of the tokens, and six documents. Shapes are [b, h, s, d], and with grouped queries [b, h, s, d, kv heads];
all are given [s, b, h, d]."""

import functools
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness.spec import Benchmark, Inputs, Peer, Provider, Shape, Traffic, randn
from parallel_ops.ops import flash_attention


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    b, h, s, d, kv_heads = (*shape, shape[1])[:5]
    return tuple(randn(s, b, heads, d, dtype=dtype, device=device) for heads in (h, kv_heads, kv_heads))


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return y.permute(2, 0, 1, 3)


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
        y: Tensor = compiled(q, k, v, block_mask=masks[key], enable_gqa=q.shape[1] != k.shape[1])
        return y.permute(2, 0, 1, 3)

    return run


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attention(q, k, v, window_size=(max(1, q.shape[0] // 4) - 1, 0))


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attention(q, k, v, cu_seqlens=_documents(q.shape[0], q.device))


@functools.cache  # data comes with it
def _documents(s: int, device: torch.device) -> Tensor:
    """Six documents; the longest has two fifths of the tokens."""
    ends = [0, *(round(s * part) for part in (0.4, 0.45, 0.65, 0.75, 0.9)), s]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def shapes(device: str, dtype: torch.dtype, quick: bool) -> list[Shape]:
    if device == "cuda":
        every: list[Shape] = [
            (1, 32, 8192, 128, 8),  # Llama 3 8B
            (1, 8, 8192, 128, 1),  # a rank of its 70B at tensor parallel 8
            (4, 32, 2048, 128, 8),
            (1, 32, 8192, 64),
            (1, 8, 4096, 128, 1),
            (1, 16, 16384, 128),
            (1, 4, 32768, 128, 1),  # a rank of a long sequence
        ]
        return every[:1] if quick else every
    return [(4, 8, 512, 32)] if quick else [(2, 8, 1024, 64), (1, 8, 2048, 32), (1, 8, 4096, 128), (4, 8, 512, 32)]


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    """Attention computes far longer than it moves: a percentage of clone says nothing about how good it is."""
    b, h, s, d, kv_heads = (*shape, shape[1])[:5]
    n = b * s * d * dtype.itemsize * (2 * h + 2 * kv_heads)
    return Traffic(forward=n, backward=2 * n)  # q, k, v, out; and their gradients


def flops(shape: Shape, direction: str) -> float:
    """Operations of the causal half: two matmuls forward, five backward, as papers count them."""
    b, h, s, d = shape[:4]
    return {"forward": 1.0, "backward": 2.5, "full": 3.5}[direction] * 4 * b * h * d * s * s / 2


BENCHMARKS = (
    Benchmark(
        "flash_attention", build, flash_attention, sdpa, traffic, shapes, tiny=(1, 1, 8, 8),
        peers={
            "triton": Peer(lambda: partial(flash_attention, backend="triton"), ("cuda",)),
            "sdpa_flash": Peer(partial(backend, SDPBackend.FLASH_ATTENTION), ("cpu", "cuda")),
            "sdpa_efficient": Peer(partial(backend, SDPBackend.EFFICIENT_ATTENTION)),
            "sdpa_cudnn": Peer(partial(backend, SDPBackend.CUDNN_ATTENTION)),
            "sdpa_math": Peer(partial(backend, SDPBackend.MATH), ("cpu",)),
            "window": Peer(lambda: windowed, ("cpu", "cuda")),
            "documents": Peer(lambda: packed, ("cpu", "cuda")),
            "flex": Peer(flex, ("cpu", "cuda"), compiles=True),
        },
        flops=flops,
    ),
)  # fmt: skip
