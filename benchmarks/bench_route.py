"""route: logits of a mixture of experts; 256 experts as DeepSeek-V3 routes to them, fewer as Mixtral."""

import torch
from torch import Tensor

from benchmarks.spec import Benchmark, Inputs, Shape, Traffic, randn
from parallel_ops.ops import route


def _options(experts: int) -> dict[str, object]:
    return {"score": "sigmoid", "groups": 8, "top_groups": 4, "scale": 2.5} if experts == 256 else {}


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    tokens, experts, top_k = shape
    return randn(tokens, experts, dtype=dtype, device=device), top_k


def ours(logits: Tensor, top_k: int) -> Tensor:
    return route(logits, top_k, **_options(logits.shape[1])).weights  # type: ignore[arg-type]


def eager(logits: Tensor, top_k: int) -> Tensor:
    """As Transformers has it, without the sums that auxiliary losses need."""
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


def traffic(shape: Shape, dtype: torch.dtype) -> Traffic:
    tokens, experts, top_k = shape
    logits, chosen = tokens * experts * dtype.itemsize, tokens * top_k
    # Reads logits, writes fp32 weights and int64 experts, and sums; backward reads both, the gradient and logits.
    return Traffic(forward=logits + 12 * chosen + 8 * experts, backward=2 * logits + 12 * chosen)


def shapes(device: str, dtype: torch.dtype, quick: bool) -> list[Shape]:
    if device == "cuda":
        return [(8192, 256, 8)] if quick else [(8192, 256, 8), (32768, 64, 6)]
    return [(2048, 64, 8)] if quick else [(2048, 64, 8), (2048, 256, 8)]


BENCHMARK = Benchmark("route", build, ours, eager, traffic, shapes, tiny=(4, 8, 2))
