"""Llama 4's mixture of experts, whose weights multiply the inputs of the experts.

    y = shared(x) + sum over the chosen e of down_e(silu(gate_e (s_e x)) * (up_e (s_e x))),   s = sigmoid(x W_router^T)

Stock runs every expert for every token, and multiplies the inputs of those that were not chosen by 0: all but one of 16
or of 128 experts. ``block`` gives its experts the chosen rows alone, and their order. Weights are ``[n, in, out]``.
"""

import copy
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from parallel_ops.integrations.huggingface._formulas import HIDDEN, INNER, SIZES
from parallel_ops.integrations.huggingface._fused import described, is_hooked, kept_ops, ops_of, stock_class
from parallel_ops.integrations.huggingface._layers import Activation, gated, other_activation
from parallel_ops.integrations.huggingface._trial import Draw, Verdict, stand_in, tried
from parallel_ops.integrations.huggingface._use import went_to_stock
from parallel_ops.ops import ExpertOrder, grouped_linear, permute, sort_by_expert, unpermute


def experts(stock: type[nn.Module], activation: Activation) -> dict[str, Any]:
    """The rows of all experts, in equal parts, as stock; with an order those that it says."""

    def forward(self: Any, hidden_states: Tensor, order: ExpertOrder | None = None) -> Tensor:
        if order is None:
            if self.training:
                went_to_stock(self, "grouped_linear", "got every token for every expert")
            return stock.forward(self, hidden_states)
        rows = grouped_linear(hidden_states, self.gate_up_proj.transpose(1, 2), order.offs)
        return grouped_linear(gated(rows, activation), self.down_proj.transpose(1, 2), order.offs)

    return {"forward": forward, "changed": other_activation(activation)}


def block(stock: type[nn.Module], router: type[nn.Module]) -> dict[str, Any]:
    """``[..., h]`` to ``[t, h]`` and the router's logits ``[t, n]``."""
    router_forward = router.forward

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(x)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        order = sort_by_expert(chosen, self.num_experts)
        rows = permute(x, order) * weights.flatten().index_select(0, order.rows)[:, None]
        routed = unpermute(self.experts(rows, order=order), order)
        return self.shared_expert(x) + routed, logits

    def changed(self: Any) -> str | None:
        if type(self.router) is not router or router.forward is not router_forward or "forward" in vars(self.router):
            return f"its router, a {described(self.router)}, has another forward since"
        if is_hooked(self.experts):
            return "there are hooks on experts, which must see every token for every expert"
        own = experts_of(self)
        if own is None or not ops_of(own):
            return "its experts are stock's"
        return next(iter(kept_ops(own).values()), None)

    return {"forward": forward, "changed": changed}


def experts_of(module: Any) -> Any:
    """The experts in a block, within wrappers of PEFT, if they take tokens alone; ``None`` for others."""
    own = module._modules.get("experts")
    while own is not None and "base_layer" in own._modules:
        own = own._modules["base_layer"]
    return own if own is not None and take_tokens_alone(own) else None


def take_tokens_alone(module: nn.Module) -> bool:
    """Whether experts are called without a choice of experts."""
    forward = (stock_class(module) or type(module)).forward
    return len(inspect.signature(forward).parameters) == 2


def try_experts(module: Any, activation: Activation) -> Verdict:
    def equal_parts(draw: Draw) -> tuple[Any, ...]:
        return _stand_in_experts(module, draw, 5), draw.rows(5 * 7, HIDDEN)

    forward = experts(type(module), activation)["forward"]

    def ours(made: Any, rows: Tensor) -> Tensor:
        ends = torch.arange(7, 36, 7, dtype=torch.int32)
        y: Tensor = forward(made, rows, ExpertOrder(ends, ends, ends))
        return y

    return tried(module, type(module).forward, {"every_token": ours}, equal_parts, activation)


def try_block(module: Any, own: Any, activation: Activation) -> Verdict:
    """Tries a block with its router and with the experts ``own``."""
    router, given = module.router, experts(type(own), activation)["forward"]

    def blocks(draw: Draw) -> tuple[Any, ...]:
        n = int(module.top_k) + 3
        choice = stand_in(router, draw, weight=draw(n, HIDDEN), bias=None, num_experts=n)
        children = {
            "router": functools.partial(type(router).forward, choice),
            "experts": functools.partial(given, _stand_in_experts(own, draw, n)),
            "shared_expert": torch.sin,
        }
        return stand_in(module, draw, **children, **SIZES, num_experts=n), draw.rows(2, 5, HIDDEN)

    ours = {"weighted_inputs": block(type(module), type(router))["forward"]}
    kinds = (type(own), type(router), type(router).forward)
    return tried(module, type(module).forward, ours, blocks, activation, *kinds)


def _stand_in_experts(module: Any, draw: Draw, n: int) -> Any:
    weights = {"gate_up_proj": draw(n, HIDDEN, 2 * INNER), "down_proj": draw(n, INNER, HIDDEN)}
    act = type(module.act_fn).forward.__get__(copy.copy(module.act_fn))
    return stand_in(module, draw, **weights, **SIZES, num_experts=n, act_fn=act)
