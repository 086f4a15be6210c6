"""permute and unpermute: tokens to the order by expert and back, weighted, with the experts between left out."""

import torch
from torch import Tensor

from benchmarks.spec import Benchmark, Inputs, Shape, Traffic, randn
from parallel_ops.ops import ExpertOrder, permute, sort_by_expert_reference, unpermute

EXPERTS = 64


def order_of(shape: Shape) -> ExpertOrder:
    """Of tokens that chose at random, each time the same."""
    tokens, _, top_k = shape
    generator = torch.Generator().manual_seed(0)
    experts = torch.rand(tokens, EXPERTS, generator=generator).topk(top_k, dim=1).indices
    return sort_by_expert_reference(experts, EXPERTS)


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    tokens, hidden, top_k = shape
    x, weights = randn(tokens, hidden, dtype=dtype, device=device), torch.rand(tokens, top_k, device=device)
    return x, weights.requires_grad_(), *(t.to(device) for t in order_of(shape))


def ours(x: Tensor, weights: Tensor, rows: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    order = ExpertOrder(rows, places, ends)
    return unpermute(permute(x, order), order, weights)


def eager(x: Tensor, weights: Tensor, rows: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """As Transformers' grouped products have it: a gather, a product in the dtype of x, and a sum over choices."""
    tokens, top_k = places.shape
    y = x[rows.long() // top_k]
    scaled = y * weights.flatten()[rows.long()].unsqueeze(-1)
    return scaled[places.flatten().long()].view(tokens, top_k, -1).sum(1).to(x.dtype)


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    tokens, hidden, top_k = shape
    of_tokens, of_rows = (n * hidden * dtype.itemsize for n in (tokens, tokens * top_k))
    numbers = 4 * tokens * top_k  # rows, places, weights: 4 bytes a slot each
    return Traffic(
        # Reads x, writes y; reads y and weights, writes x. Each with its places, the first with rows for padding.
        forward=2 * (of_tokens + of_rows) + 4 * numbers,
        # Reads the gradient and y, writes dy and dweights; reads dy, writes dx.
        backward=2 * of_tokens + 3 * of_rows + 5 * numbers,
    )


def shapes(device: str, dtype: torch.dtype, quick: bool) -> list[Shape]:
    if device == "cuda":
        return [(8192, 4096, 8)] if quick else [(8192, 7168, 8), (32768, 4096, 6)]
    return [(2048, 512, 8)]


def index_values(shape: Shape) -> dict[int, Tensor]:
    """What the inputs of ``build`` that are indices hold, for tensors without memory."""
    return {index + 2: t for index, t in enumerate(order_of(shape))}


BENCHMARK = Benchmark("permute", build, ours, eager, traffic, shapes, tiny=(4, 8, 2), index_values=index_values)
