"""The parts of a model that run Megatron's own code although ops are applied, and why."""

from collections.abc import Collection, Iterator
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import nn

from parallel_ops.integrations.megatron.experts import groups_fit

# Ops, the field of the configuration that their replacement needs, and its value.
_NEEDED = (
    (("bias_gelu", "bias_swiglu", "bias_geglu"), "bias_activation_fusion", True),
    (("rotary",), "apply_rope_fusion", False),
    (("weight_gradient",), "gradient_accumulation_fusion", True),
)
_OTHERS = {"transformer_engine": "Transformer Engine", "apex": "Apex", "flash_attn": "flash-attn"}


def unreplaced_in(model: nn.Module, ops: Collection[str], *, deterministic: bool = False) -> dict[str, str]:
    """See ``Applied.unreplaced``."""
    reasons: dict[str, str] = {}
    configs: list[Any] = []
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if hasattr(config, "bias_activation_fusion") and not any(config is known for known in configs):
            configs.append(config)
            fields = [*_by_config(config, ops), *(_not_deterministic(config, ops) if deterministic else ())]
            reasons |= {f"{name or type(model).__name__}.config.{field}": why for field, why in fields}
        if why := _by_kind(module, ops):
            reasons[name or type(model).__name__] = why
    return reasons


def _by_config(config: Any, ops: Collection[str]) -> Iterator[tuple[str, str]]:
    for served, field, wanted in _NEEDED:
        applied = [op for op in served if op in ops]
        if applied and bool(getattr(config, field, not wanted)) is not wanted:
            yield field, f"{', '.join(applied)}: it is {'off' if wanted else 'on'}"
    if "cross_entropy" in ops and config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te":
        yield "cross_entropy_fusion_impl", "cross_entropy: it is 'te'"
    if getattr(config, "num_moe_experts", None):
        yield from _of_experts(config, ops)


def _not_deterministic(config: Any, ops: Collection[str]) -> Iterator[tuple[str, str]]:
    if not getattr(config, "deterministic_mode", False):
        yield "deterministic_mode", "deterministic: it is off, so Megatron's own layers may add by atomics"
    fused = getattr(config, "cross_entropy_loss_fusion", False)
    if fused and ("cross_entropy" not in ops or config.cross_entropy_fusion_impl == "te"):
        yield "cross_entropy_loss_fusion", "deterministic: it is on, and the fused loss is not this package's"
    if getattr(config, "tp_comm_overlap", False):
        yield "tp_comm_overlap", "deterministic: it is on, and Transformer Engine adds what arrives first"


def _of_experts(config: Any, ops: Collection[str]) -> Iterator[tuple[str, str]]:
    """Features of the router and the dispatcher of tokens that the ops lack."""
    on = {
        "router": ("moe_router_fusion", "moe_enable_routing_replay"),
        "permute": ("moe_permute_fusion", "moe_pad_expert_input_to_capacity"),
    }
    for op, fields in on.items():
        for field in fields:
            if op in ops and getattr(config, field, False):
                yield field, f"{op}: it is on"
    if "router" not in ops:
        return
    kinds = getattr(config, "moe_router_load_balancing_type", "none")
    if "sinkhorn" in ([kinds] if isinstance(kinds, str) else kinds):
        yield "moe_router_load_balancing_type", "router: it is 'sinkhorn'"
    score = getattr(config, "moe_router_score_function", "softmax")
    if score not in ("softmax", "sigmoid"):
        yield "moe_router_score_function", f"router: it is {score!r}"
    group_topk = getattr(config, "moe_router_group_topk", None)
    if not groups_fit(config.moe_router_topk, getattr(config, "moe_router_num_groups", None), group_topk):
        yield "moe_router_group_topk", "router: a group's score is not the sum of its two best"


def _by_kind(module: nn.Module, ops: Collection[str]) -> str | None:
    kind: Any = type(module)
    for base in kind.__mro__:  # Megatron wraps modules of other libraries in its own classes
        if other := _OTHERS.get(base.__module__.partition(".")[0]):
            return f"it is of {other}"
    if kind in (nn.LayerNorm, nn.RMSNorm) and "norm" in ops:
        return "norm: it was built before apply(); models built since, and specs, have this package's"
    own = isinstance(module, DotProductAttention) and kind.forward is not DotProductAttention.forward
    if own and "attention" in ops and not kind.__module__.startswith("parallel_ops."):
        return "attention: its class has a forward of its own"
    return None
