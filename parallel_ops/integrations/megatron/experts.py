"""Megatron-core's router and token permutation on the ops, with Megatron's names and arguments; see ``functions.py``.

Megatron describes a choice of experts by a map ``[tokens, experts]`` of booleans, in which a token may have any number
of experts. So every pair of token and expert is a slot of the order, and has an expert only where the map is true: the
slots of an expert are its column of the map, and a flat index into the map is the number of a slot.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from parallel_ops import ops
from parallel_ops.integrations.megatron._options import given
from parallel_ops.integrations.megatron.functions import Function
from parallel_ops.ops import ExpertOrder

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_PADDING = ("tokens_per_expert", "align_size")  # of the fused permute; the first is returned as it is
_ORDER = "_parallel_ops_order"  # of the indices that permute returns, for unpermute


def topk_routing(original: Function, exact: bool) -> Function:
    """``topk_routing_with_score_function``. Scores of 16-bit logits are not rounded before the choice, as they are in
    the original through 0.17."""

    def topk_routing_with_score_function(
        logits: Tensor,
        topk: int,
        use_pre_softmax: bool = False,
        num_groups: int | None = None,
        group_topk: int | None = None,
        scaling_factor: float | None = None,
        score_function: str = "softmax",
        expert_bias: Tensor | None = None,
        fused: bool = False,
        router_replay: Any = None,
        dense_output: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        softmax = score_function == "softmax"
        fits = score_function == "sigmoid" or (softmax and expert_bias is None)
        fits = fits and groups_fit(topk, num_groups, group_topk) and logits.dtype in _DTYPES
        if exact and logits.dtype is not torch.float32:
            fits = False
        # The original then fills its tensors by other functions of torch.
        deterministic = torch.are_deterministic_algorithms_enabled()
        if not fits or fused or router_replay is not None or given(options) or deterministic:
            if dense_output:  # since 0.17
                options["dense_output"] = True
            return original(
                logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias,
                fused, router_replay, **options,
            )  # fmt: skip
        routing = ops.route(
            logits,
            topk,
            score="softmax" if softmax else "sigmoid",
            bias=expert_bias,
            groups=num_groups if group_topk and num_groups else 1,
            top_groups=group_topk if group_topk and num_groups else 1,
            top_k_first=softmax and not use_pre_softmax,
            normalize=not softmax and topk > 1,
            scale=float(scaling_factor or 1.0),
        )
        weights = routing.weights.to(logits.dtype)
        if dense_output:
            return weights, routing.experts
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, routing.experts, True)
        return torch.zeros_like(logits).scatter(1, routing.experts, weights), chosen

    return topk_routing_with_score_function


def groups_fit(topk: int, num_groups: int | None, group_topk: int | None) -> bool:
    """Whether a group's score is the sum of its two best, as in the op, or of no effect."""
    return not group_topk or not num_groups or group_topk == num_groups or topk // group_topk == 2


def permute(original: Function, exact: bool) -> Function:
    """Gradients of 16-bit tokens are summed in fp32, and rounded once."""
    # Since 0.17 the number of rows is an argument, so that the host need not wait for the map, and results are five.
    later = "align_size" in inspect.signature(original).parameters

    def permute(
        tokens: Tensor,
        routing_map: Tensor,
        probs: Tensor | None = None,
        num_out_tokens: Any = None,
        fused: bool = False,
        drop_and_pad: bool = False,
        *padding: Any,
        **options: Any,
    ) -> tuple[Any, ...]:
        fits = not fused and not drop_and_pad and _fits(tokens, exact) and routing_map.dim() == 2
        fits = fits and len(padding) <= len(_PADDING) and not given(options, _PADDING)
        if not fits or (later and num_out_tokens is None):
            return original(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad, *padding, **options)
        order = _order(routing_map, int(num_out_tokens) if later else None)
        y = ops.permute(tokens, order)
        of_rows = None
        if probs is not None:
            of_rows = probs.flatten().index_select(0, order.rows.clamp(min=0))
            if later:
                of_rows = of_rows.masked_fill(order.rows < 0, 0)
        indices = order.rows.long().clamp(min=0).div(routing_map.shape[1], rounding_mode="floor")
        setattr(indices, _ORDER, order)
        if not later:
            return y, of_rows, indices
        return y, of_rows, indices, None, padding[0] if padding else options.get("tokens_per_expert")

    return permute


def unpermute(original: Function, exact: bool) -> Function:
    """Sums of 16-bit rows are in fp32, and rounded once."""

    def unpermute(
        permuted_tokens: Tensor,
        sorted_indices: Tensor,
        restore_shape: Any,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        fused: bool = False,
        drop_and_pad: bool = False,
        *padding: Any,
        **options: Any,
    ) -> Tensor:
        order = getattr(sorted_indices, _ORDER, None)
        fits = not fused and not drop_and_pad and not any(t is not None for t in padding) and not given(options)
        if not fits or order is None or not _fits(permuted_tokens, exact) or restore_shape[0] != len(order.places):
            return original(
                permuted_tokens, sorted_indices, restore_shape, probs, routing_map, fused, drop_and_pad, *padding,
                **options,
            )  # fmt: skip
        return ops.unpermute(permuted_tokens, order, probs)

    return unpermute


def _fits(tokens: Tensor, exact: bool) -> bool:
    dtypes = (torch.float32, torch.float64) if exact else _DTYPES
    return tokens.dtype in dtypes and tokens.dim() == 2 and type(tokens) is Tensor


def _order(routing_map: Tensor, rows: int | None) -> ExpertOrder:
    """The order of the tokens by expert. Without ``rows`` the host waits for their number, as Megatron 0.16 does."""
    experts = torch.arange(routing_map.shape[1], dtype=torch.int32, device=routing_map.device)
    order = ops.sort_by_expert(torch.where(routing_map.bool(), experts, -1), routing_map.shape[1])
    if rows is None:
        rows = int(order.offs[-1])
        return ExpertOrder(order.rows[:rows], order.places, order.offs)
    # Megatron drops what goes beyond the rows.
    return ExpertOrder(
        order.rows[:rows], order.places.masked_fill(order.places >= rows, -1), order.offs.clamp(max=rows)
    )
