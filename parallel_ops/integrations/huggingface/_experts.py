"""The router and the experts of a mixture of experts, as Transformers 5 has them: two modules with stacked weights.

    chosen experts, weights = route(x W_router^T)
    rows                    = permute(x) by expert
    y                       = unpermute(down_e(weight * silu(gate_e rows) * (up_e rows)))

The weights are applied with the activation, so what the experts return is not kept for the backward.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from parallel_ops.integrations.huggingface._layers import Activation, gated, other_activation
from parallel_ops.integrations.huggingface._use import went_to_stock
from parallel_ops.ops import bias_swiglu, grouped_linear, permute, route, sort_by_expert, unpermute

# Transformers' own for a step of generation on a GPU, "batched_mm", needs no sorting, and "deepgemm" and others are
# kernels that a user has chosen.
REPLACED = (None, "eager", "grouped_mm")


def obstacle(implementation: str | None) -> str | None:
    """Why the experts of a model that is set to ``implementation`` are kept."""
    if implementation in REPLACED:
        return None
    return f"the model is set to {implementation!r} experts; only 'grouped_mm' and 'eager' are replaced"


def router(stock: type[nn.Module], kind: str) -> dict[str, Any]:
    """``[..., h]`` to the router's logits ``[t, n]``, and weights and indices ``[t, k]`` of the chosen experts.

    ``kind``: ``"softmax_top_k"``, or with a bias and the softmax of the chosen logits alone ``"top_k_softmax"``.
    """

    def softmax_top_k(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        # Mixtral always divides by the sum, so it has no option for that.
        routing = route(logits, self.top_k, normalize=bool(getattr(self, "norm_topk_prob", True)))
        return logits, routing.weights, routing.experts

    def top_k_softmax(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden_states, self.weight, self.bias)
        routing = route(logits, self.top_k, top_k_first=True)
        return logits, routing.weights.to(logits.dtype), routing.experts

    return {"forward": {f.__name__: f for f in (softmax_top_k, top_k_softmax)}[kind]}


def stacked(stock: type[nn.Module], activation: Activation) -> dict[str, Any]:
    """Gate and up ``[n, 2f, h]``, the gate first."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.config._experts_implementation not in REPLACED or getattr(self, "_is_expert_parallel", False):
            if self.training:
                went_to_stock(self, "grouped_linear", "was set to another implementation or shared by ranks")
            return stock.forward(self, hidden_states, top_k_index, top_k_weights)
        order = sort_by_expert(top_k_index, self.num_experts)
        weights = top_k_weights.flatten().index_select(0, order.rows)
        rows = grouped_linear(permute(hidden_states, order), self.gate_up_proj, order.offs)
        rows = gated(rows, activation, weights)
        return unpermute(grouped_linear(rows, self.down_proj, order.offs), order).to(hidden_states.dtype)

    def kept(self: Any) -> dict[str, str]:
        reason = obstacle(self.config._experts_implementation)
        return {} if reason is None else {"grouped_linear": reason}

    return {"forward": forward, "changed": other_activation(activation), "kept": kept}


def interleaved(stock: type[nn.Module], activation: None) -> dict[str, Any]:
    """gpt-oss: gate and up in turns ``[n, h, 2f]``, biases, a limited SwiGLU."""

    def forward(self: Any, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        order = sort_by_expert(router_indices, self.num_experts)
        up = self.gate_up_proj.transpose(1, 2)
        rows = grouped_linear(permute(hidden_states, order), up, order.offs, bias=self.gate_up_proj_bias)
        rows = bias_swiglu(rows, alpha=self.alpha, limit=self.limit, up_offset=1.0, interleaved=True)
        rows = grouped_linear(rows, self.down_proj.transpose(1, 2), order.offs, bias=self.down_proj_bias)
        return unpermute(rows, order, routing_weights).to(hidden_states.dtype)

    return {"forward": forward}


EXPERTS: dict[str, Callable[..., dict[str, Any]]] = {"stacked": stacked, "interleaved": interleaved}
