"""Mixtures of experts: the router, the order of tokens by expert, tokens in that order and back, and the linears."""

from parallel_ops.ops.experts.grouped_linear import grouped_linear, grouped_linear_reference
from parallel_ops.ops.experts.order import ExpertOrder, sort_by_expert, sort_by_expert_reference
from parallel_ops.ops.experts.permute import permute, permute_reference, unpermute, unpermute_reference
from parallel_ops.ops.experts.route import Routing, load_balancing_loss, route, route_reference

__all__ = [
    "ExpertOrder",
    "Routing",
    "grouped_linear",
    "grouped_linear_reference",
    "load_balancing_loss",
    "permute",
    "permute_reference",
    "route",
    "route_reference",
    "sort_by_expert",
    "sort_by_expert_reference",
    "unpermute",
    "unpermute_reference",
]
