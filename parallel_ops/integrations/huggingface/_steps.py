"""What is done with a module in its role: the steps for one that is replaced, or the reason why it is not."""

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from parallel_ops.integrations.huggingface import (
    _attention,
    _experts,
    _formulas,
    _layers,
    _loss,
    _weighted_inputs,
)
from parallel_ops.integrations.huggingface._families import base_of, stock_of
from parallel_ops.integrations.huggingface._fused import (
    Recipe,
    described,
    fused_class,
    is_hooked,
    is_own,
    is_wrapped,
    obstacle,
    uses,
)

LOSS = "vocab_parallel_linear_cross_entropy"


@dataclass(frozen=True)
class Swap:
    """A module, by its name in the model, and its new class."""

    name: str
    module: nn.Module
    fused: type[nn.Module]
    ops: tuple[str, ...]  # ops that it now calls; empty if it is changed for another module's op


@dataclass(frozen=True)
class Skipped:
    """A module that keeps its forward although a requested op is meant for it."""

    name: str
    op: str
    reason: str


Step = Swap | Skipped


def norm(name: str, module: Any, stock: type[nn.Module]) -> Iterator[Step]:
    kind: str | None = None
    reason = obstacle(module, stock)
    if any(weight.dim() != 1 for weight in module.parameters()):
        reason = reason or "its weight differs between heads"
    if reason is None:
        kind, reason = _formulas.norm(module)
    op = "rms_norm" if "rms" in (kind or "") else "layer_norm"
    if kind is None:
        op = "rms_norm" if stock.__name__.endswith("RMSNorm") else "layer_norm"
        yield Skipped(name, op, str(reason))
        return
    yield _swap(name, module, (op,), _layers.norm, kind)


def mlp(name: str, module: Any, stock: type[nn.Module]) -> Iterator[Step]:
    if "w1" in module._modules:  # an expert of Mixtral before Transformers 5, reported with its block
        return
    if "experts" in module._modules:  # gpt-oss's name for a mixture of experts
        return
    name_of_act = next((n for n in ("act_fn", "activation_fn", "act") if hasattr(module, n)), "")
    act = getattr(module, name_of_act, None)
    activation = None if act is None else _layers.activation_of(module, name_of_act)
    gelu = activation is not None and activation.formula != "silu"
    one = "c_fc" in module._modules
    op = (
        "bias_gelu"
        if one
        else "gelu_mul"
        if gelu
        else "bias_swiglu"
        if "gate_up_proj" in module._modules
        else "silu_mul"
    )
    kind: str | None = None
    reason = obstacle(module, stock, {} if act is None else {"its activation": act})
    if reason is None and (activation is None or (one and not gelu)):
        reason = _no_op(act)
    if reason is None and activation is not None:
        kind, reason = _formulas.mlp(module, activation)
    if kind is None:
        yield Skipped(name, op, str(reason))
        return
    yield _swap(name, module, (op,), _layers.MLPS[kind], activation, kind.endswith("dropout"))
    linear = getattr(module, "c_fc", None)
    known = {Conv1D: _layers.transposed_linear, nn.Linear: _layers.linear}
    if linear is not None and type(linear) in known and obstacle(linear, type(linear), {"it": linear}) is None:
        yield _swap(f"{name}.c_fc", linear, (), known[type(linear)])


def gpt2_block(name: str, module: Any, stock: type[nn.Module]) -> Iterator[Step]:
    if stock.__name__ != "GPT2Block":  # another family's name for a mixture of experts
        return
    dropouts: dict[str, Any] = {
        path: getattr(getattr(module, path.split(".")[0]), path.split(".")[1], None)
        for path in ("attn.resid_dropout", "mlp.dropout")
    }
    reason = obstacle(module, stock) or _formulas.block(module)[1]
    if hasattr(module, "crossattention"):
        reason = "it has cross-attention"
    for path, dropout in dropouts.items():
        parent = module.get_submodule(path.split(".")[0])
        family = stock_of(parent)
        if family is None or type(dropout) is not nn.Dropout or obstacle(parent, family):
            reason = f"its {path} is not what stock modules have"
        elif is_hooked(parent) or is_hooked(dropout):
            reason = f"there are hooks on {path} or around it, which must see what dropout leaves"
    if reason:
        yield Skipped(name, "bias_dropout_add", reason)
        return
    yield _swap(name, module, ("bias_dropout_add",), _layers.gpt2_block)
    for path, dropout in dropouts.items():
        yield _swap(f"{name}.{path}", dropout, (), _layers.deferred_dropout)


def router(name: str, module: nn.Module, stock: type[nn.Module]) -> Iterator[Step]:
    kind, reason = (None, obstacle(module, stock)) if obstacle(module, stock) else _formulas.router(module)
    if kind is None:
        yield Skipped(name, "route", str(reason))
        return
    yield _swap(name, module, ("route",), _experts.router, kind)


def experts(name: str, module: Any, stock: type[nn.Module]) -> Iterator[Step]:
    kind, why, activation = _kind_of_experts(module, stock)
    if kind is None:
        yield Skipped(name, "grouped_linear", why)
        return
    gelu = activation is not None and activation.formula != "silu"
    ops: tuple[str, ...] = ("grouped_linear", "gelu_mul" if gelu else "bias_swiglu")
    if kind == "every_token":
        yield _swap(name, module, ops, _weighted_inputs.experts, activation)
    else:
        ops = ("sort_by_expert", "permute", *ops, "unpermute")
        yield _swap(name, module, ops, _experts.EXPERTS[kind], activation)


def _kind_of_experts(module: Any, stock: type[nn.Module]) -> tuple[str | None, str, Any]:
    """(the forward of ours, why there is none, their activation)"""
    act = getattr(module, "act_fn", None)
    activation = None if act is None else _layers.activation_of(module, "act_fn")
    reason = obstacle(module, stock, {} if act is None else {"its activation": act})
    config = getattr(module, "config", None)
    reason = reason or (None if config is None else _experts.obstacle(config._experts_implementation))
    reason = reason or (_no_op(act) if act is not None and activation is None else None)
    if reason is None and act is None and "gate_up_proj_bias" not in module._parameters:
        reason = "it has no activation"  # GraniteMoE's, before Transformers 5, are linears
    if reason:
        return None, reason, activation
    if activation is not None and _weighted_inputs.take_tokens_alone(module):
        return *_weighted_inputs.try_experts(module, activation), activation
    return *_formulas.experts(module, activation), activation


def block_of_experts(name: str, module: Any, stock: type[nn.Module]) -> Iterator[Step]:
    own = _weighted_inputs.experts_of(module)
    family = None if own is None else stock_of(own)
    if family is None:  # another family's block, whose experts get the choice
        return
    kind, _, activation = _kind_of_experts(own, family)
    if kind is None:  # reported with the experts
        return
    router = module.router
    reason = obstacle(module, stock, {"experts": module.experts})
    if reason is None and is_wrapped(router):
        reason = "something else has replaced the forward of its router"
    if reason is None:
        kind, reason = _weighted_inputs.try_block(module, own, activation)
    if reason:
        yield Skipped(name, "permute", reason)
        return
    yield _swap(name, module, ("sort_by_expert", "permute", "unpermute"), _weighted_inputs.block, type(router))


def separate_experts(name: str, module: Any, stock: type[nn.Module]) -> Iterator[Step]:
    if isinstance(module.experts, nn.ModuleList):
        yield Skipped(name, "grouped_linear", "its experts have separate weights, as before Transformers 5")


def attention(
    name: str, module: nn.Module, stock: type[nn.Module], config: Any, layouts: set[str | None], ops: Collection[str]
) -> Iterator[Step]:
    reason = obstacle(module, stock)
    if hasattr(stock.forward, "__wrapped__") and not is_own(stock.forward):
        reason = reason or f"something has wrapped the forward of {stock.__name__}, of which a copy would be called"
    pairs: str | None = None
    core: str | None = None
    rotations = [n for n in inspect.unwrap(stock.forward).__code__.co_names if n.endswith("rotary_pos_emb")]
    if "rotary" in ops and rotations:
        pairs, why = _rotation(stock, rotations[0], layouts)
        if reason or why:
            pairs = None
            yield Skipped(name, "rotary_embedding_qk", reason or why or "")
    if "attention" in ops and uses(stock.forward, "ALL_ATTENTION_FUNCTIONS"):
        sinks = hasattr(module, "sinks") and uses(stock.forward, "eager_attention_forward")
        kind = "eager" if sinks else "sdpa"  # which Transformers takes for models with sinks
        why = _attention.obstacle(config._attn_implementation, kind)
        if getattr(module, "attn_logit_softcapping", None) is not None:
            why = why or "its scores are softly capped, which only 'eager' attention does"
        if sinks:
            why = why or _formulas.sinks(inspect.unwrap(stock.forward).__globals__["eager_attention_forward"])[1]
        else:
            why = why or _formulas.core(ALL_ATTENTION_FUNCTIONS["sdpa"])[1]
        core = None if reason or why else kind
        if core is None:
            yield Skipped(name, "flash_attention", reason or why or "")
    if pairs or core:
        replaced = ("rotary_embedding_qk",) * bool(pairs) + ("flash_attention",) * bool(core)
        yield _swap(name, module, replaced, _attention.attention, pairs, core)


def rotary_tables(name: str, module: nn.Module, stock: type[nn.Module]) -> Iterator[Step]:
    if obstacle(module, stock) is None and table_layout(module) is not None:
        yield _swap(name, module, (), _attention.tables)


def table_layout(module: nn.Module) -> str | None:
    """How the tables of a rotary embedding lie; ``None`` if its forward is not known."""
    return None if is_wrapped(module) else _formulas.tables(module)


def _rotation(stock: Any, name: str, layouts: set[str | None]) -> tuple[str | None, str | None]:
    """(which dimensions make a pair, and how tables lie; why that is not known)"""
    pairs, why = _formulas.rotation(inspect.unwrap(stock.forward).__globals__[name])
    if pairs is None or name != "apply_rotary_pos_emb":
        return None, why or f"it rotates by {name}"
    needed = {"interleaved": "interleaved", "half_by_single_tables": "single"}.get(pairs, "half")
    return (pairs, None) if layouts == {needed} else (None, "its rotary tables are not recognized")


def loss(name: str, module: Any, stock: type[nn.Module], skip_logits: bool) -> Iterator[Step]:
    head = module.lm_head
    kind: str | None = None
    reason = obstacle(module, stock)
    if not stock.__name__.endswith(("ForCausalLM", "LMHeadModel")):
        reason = "its loss is not that of a causal language model alone"
    elif _loss.other_loss(module):
        reason = _loss.other_loss(module)
    elif not all(map(is_own, _loss.registered_loss())):
        reason = _loss.OTHER_REGISTERED_LOSS
    elif type(head) is not nn.Linear:
        reason = f"its lm_head is a {described(head)}"
    else:
        reason = reason or obstacle(head, nn.Linear, {"it": head})
    if reason is None:
        kind, reason = _formulas.head(module)
    if kind in ("divided", "multiplied") and head.bias is not None:
        kind, reason = None, "its lm_head has a bias, and its logits are scaled"
    if kind is None:
        yield Skipped(name or type(module).__name__, LOSS, str(reason))
        return
    yield _swap(name or type(module).__name__, module, (LOSS,), _loss.causal_lm, skip_logits, kind, base_of(module))
    yield _swap(f"{name}.lm_head".lstrip("."), head, (), _loss.head)


def _swap(name: str, module: nn.Module, ops: tuple[str, ...], recipe: Recipe, *options: Any) -> Swap:
    stock: Any = type(module)
    return Swap(name, module, fused_class(stock, ops, recipe, *options), ops)


def _no_op(activation: Any) -> str:
    return f"its activation is {described(activation)}, for which there is no op"
