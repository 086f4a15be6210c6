"""Mixtures of experts: ``route``, and ``permute`` with ``unpermute``, tokens to the order by expert and back.

Logits for 256 experts are routed as by DeepSeek-V3, for fewer as by Mixtral.
"""

import torch
from torch import Tensor

from benchmarks.harness.spec import Benchmark, Inputs, Shape, Traffic, randn
from parallel_ops.ops import ExpertOrder, permute, route, sort_by_expert_reference, unpermute

EXPERTS = 64


def _route_options(experts: int) -> dict[str, object]:
    return {"score": "sigmoid", "groups": 8, "top_groups": 4, "scale": 2.5} if experts == 256 else {}


def logits(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    tokens, experts, top_k = shape
    return randn(tokens, experts, dtype=dtype, device=device), top_k


def route_weights(logits: Tensor, top_k: int) -> Tensor:
    return route(logits, top_k, **_route_options(logits.shape[1])).weights  # type: ignore[arg-type]


def route_eager(logits: Tensor, top_k: int) -> Tensor:
    """Transformers' composite, without the sums that auxiliary losses need."""
    x = logits.float()
    if logits.shape[1] == 256:
        scores = x.sigmoid()
        groups = scores.view(-1, 8, 32)
        kept = groups.topk(2, dim=-1)[0].sum(-1).topk(4, dim=-1)[1]
        mask = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, kept, False)
        experts = groups.masked_fill(mask.unsqueeze(-1), -torch.inf).flatten(1).topk(top_k, dim=-1)[1]
        weights = scores.gather(1, experts)
        return 2.5 * weights / (weights.sum(-1, keepdim=True) + 1e-20)
    scores = x.softmax(-1)
    weights = scores.topk(top_k, dim=-1)[0]
    return weights / weights.sum(-1, keepdim=True)


def route_traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    tokens, experts, top_k = shape
    logits, chosen = tokens * experts * dtype.itemsize, tokens * top_k
    # Reads logits, writes fp32 weights and int64 experts, and sums; backward reads both, the gradient and logits.
    return Traffic(forward=logits + 12 * chosen + 8 * experts, backward=2 * logits + 12 * chosen)


def route_shapes(device: str, dtype: torch.dtype, quick: bool) -> list[Shape]:
    if device == "cuda":
        return [(8192, 256, 8)] if quick else [(8192, 256, 8), (32768, 64, 6)]
    return [(2048, 64, 8)] if quick else [(2048, 64, 8), (2048, 256, 8)]


def order_of(shape: Shape) -> ExpertOrder:
    """The order of tokens that chose at random, each time the same."""
    tokens, _, top_k = shape
    generator = torch.Generator().manual_seed(0)
    experts = torch.rand(tokens, EXPERTS, generator=generator).topk(top_k, dim=1).indices
    return sort_by_expert_reference(experts, EXPERTS)


def tokens_and_order(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    tokens, hidden, top_k = shape
    x, weights = randn(tokens, hidden, dtype=dtype, device=device), torch.rand(tokens, top_k, device=device)
    return x, weights.requires_grad_(), *(t.to(device) for t in order_of(shape))


def there_and_back(x: Tensor, weights: Tensor, rows: Tensor, places: Tensor, offs: Tensor) -> Tensor:
    order = ExpertOrder(rows, places, offs)
    return unpermute(permute(x, order), order, weights)


def permute_eager(x: Tensor, weights: Tensor, rows: Tensor, places: Tensor, offs: Tensor) -> Tensor:
    """Transformers' composite for grouped matmuls: a gather, a matmul in the dtype of x, and a sum over choices."""
    tokens, top_k = places.shape
    y = x[rows.long() // top_k]
    scaled = y * weights.flatten()[rows.long()].unsqueeze(-1)
    return scaled[places.flatten().long()].view(tokens, top_k, -1).sum(1).to(x.dtype)


def permute_traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    tokens, hidden, top_k = shape
    of_tokens, of_rows = (n * hidden * dtype.itemsize for n in (tokens, tokens * top_k))
    numbers = 4 * tokens * top_k  # rows, places, weights: 4 bytes a slot each
    return Traffic(
        # Reads x, writes y; reads y and weights, writes x. Each with its places, the first with rows for padding.
        forward=2 * (of_tokens + of_rows) + 4 * numbers,
        # Reads the gradient and y, writes dy and dweights; reads dy, writes dx.
        backward=2 * of_tokens + 3 * of_rows + 5 * numbers,
    )


def permute_shapes(device: str, dtype: torch.dtype, quick: bool) -> list[Shape]:
    if device == "cuda":
        return [(8192, 4096, 8)] if quick else [(8192, 7168, 8), (32768, 4096, 6)]
    return [(2048, 512, 8)]


def index_values(shape: Shape) -> dict[int, Tensor]:
    """The values of the inputs that are indices, for tensors without memory."""
    return {index + 2: t for index, t in enumerate(order_of(shape))}


BENCHMARKS = (
    Benchmark("route", logits, route_weights, route_eager, route_traffic, route_shapes, (4, 8, 2)),
    Benchmark("permute", tokens_and_order, there_and_back, permute_eager, permute_traffic, permute_shapes, (4, 8, 2),
              index_values=index_values),
)  # fmt: skip
