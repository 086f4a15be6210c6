"""What is done with a module in its role: the steps for one that is replaced, or the reason why it is not."""

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from parallel_ops.integrations.huggingface import _attention, _experts, _layers, _loss
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
from parallel_ops.integrations.huggingface._known import formula
from parallel_ops.integrations.huggingface._source import digest

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
    module: nn.Module
    op: str
    reason: str


Step = Swap | Skipped


def norm(name: str, module: Any, stock: type[nn.Module]) -> Iterator[Step]:
    kind = formula("norm", stock.forward, stock)
    op = "rms_norm" if stock.__name__.endswith("RMSNorm") else "layer_norm"
    reason = obstacle(module, stock) or _unknown(kind, stock.forward, stock)
    if reason is None and kind != "olmo" and module.weight.dim() != 1:
        reason = "its weight differs between heads"
    if reason or kind is None:
        yield Skipped(name, module, op, reason or "")
        return
    yield _swap(name, module, (op,), _layers.norm, kind)


def layer_norm(name: str, module: nn.LayerNorm) -> Step:
    reason = obstacle(module, nn.LayerNorm)
    if len(module.normalized_shape) != 1:
        reason = "it normalises several dimensions"
    if reason:
        return Skipped(name, module, "layer_norm", reason)
    return _swap(name, module, ("layer_norm",), _layers.norm, "torch")


def mlp(name: str, module: Any, stock: type[nn.Module]) -> Iterator[Step]:
    kind = formula("mlp", stock.forward, stock)
    name_of_act = next((n for n in ("act_fn", "activation_fn", "act") if hasattr(module, n)), "")
    act = getattr(module, name_of_act, None)
    reason = obstacle(module, stock, {} if act is None else {"its activation": act})
    reason = reason or _unknown(kind, stock.forward, stock)
    activation = None if act is None else _layers.activation_of(act)
    gelu = activation in ("tanh", "none")
    if kind in ("gelu", "gelu_dropout"):
        op = "bias_gelu"
    elif kind == "gate_and_up" and not gelu:
        op = "bias_swiglu"
    else:
        op = "gelu_mul" if gelu else "silu_mul"
    if reason is None and (activation is None or (op == "bias_gelu" and not gelu)):
        reason = _no_op(act)
    if reason or kind is None:
        yield Skipped(name, module, op, reason or "")
        return
    recipe = {"gate_and_up": _layers.gate_and_up_mlp, "gated": _layers.gated_mlp, "gated_dropout": _layers.gated_mlp}
    yield _swap(
        name,
        module,
        (op,),
        recipe.get(kind, _layers.gelu_mlp),
        activation,
        (name_of_act, type(act)),
        kind.endswith("dropout"),
    )
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
    reason = obstacle(module, stock) or _unknown(formula("block", stock.forward, stock), stock.forward, stock)
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
        yield Skipped(name, module, "bias_dropout_add", reason)
        return
    yield _swap(name, module, ("bias_dropout_add",), _layers.gpt2_block)
    for path, dropout in dropouts.items():
        yield _swap(f"{name}.{path}", dropout, (), _layers.deferred_dropout)


def router(name: str, module: nn.Module, stock: type[nn.Module]) -> Iterator[Step]:
    known = formula("router", stock.forward, stock)
    reason = obstacle(module, stock) or _unknown(known, stock.forward, stock)
    yield Skipped(name, module, "route", reason) if reason else _swap(name, module, ("route",), _experts.router)


def experts(name: str, module: Any, stock: type[nn.Module]) -> Iterator[Step]:
    activation = _layers.activation_of(module.act_fn)
    gated = "gelu_mul" if activation in ("tanh", "none") else "bias_swiglu"
    reason = obstacle(module, stock, {"its activation": module.act_fn})
    reason = reason or _unknown(formula("experts", stock.forward, stock), stock.forward, stock)
    reason = reason or (None if activation else _no_op(module.act_fn))
    reason = reason or _experts.obstacle(module.config._experts_implementation)
    if reason:
        yield Skipped(name, module, "grouped_linear", reason)
        return
    ops = ("sort_by_expert", "permute", "grouped_linear", gated, "unpermute")
    yield _swap(name, module, ops, _experts.experts, activation, type(module.act_fn))


def separate_experts(name: str, module: Any, stock: type[nn.Module]) -> Iterator[Step]:
    if isinstance(module.experts, nn.ModuleList):
        yield Skipped(name, module, "grouped_linear", "its experts have separate weights, as before Transformers 5")


def attention(
    name: str, module: nn.Module, stock: type[nn.Module], config: Any, layouts: set[str | None], ops: Collection[str]
) -> Iterator[Step]:
    reason = obstacle(module, stock)
    pairs: str | None = None
    core = False
    rotations = [n for n in inspect.unwrap(stock.forward).__code__.co_names if n.endswith("rotary_pos_emb")]
    if "rotary" in ops and rotations:
        pairs, why = _rotation(stock, rotations[0], layouts)
        if reason or why:
            pairs = None
            yield Skipped(name, module, "rotary_embedding_qk", reason or why or "")
    if "attention" in ops and uses(stock.forward, "ALL_ATTENTION_FUNCTIONS"):
        why = _attention.obstacle(config._attn_implementation)
        if getattr(module, "attn_logit_softcapping", None) is not None:
            why = why or "its scores are softly capped, which only 'eager' attention does"
        core = not (reason or why)
        if not core:
            yield Skipped(name, module, "flash_attention", reason or why or "")
    if pairs or core:
        replaced = ("rotary_embedding_qk",) * bool(pairs) + ("flash_attention",) * core
        yield _swap(name, module, replaced, _attention.attention, pairs, core)


def rotary_tables(name: str, module: nn.Module, stock: type[nn.Module]) -> Iterator[Step]:
    if table_layout(module) is not None and obstacle(module, stock) is None:
        yield _swap(name, module, (), _attention.tables)


def table_layout(module: nn.Module) -> str | None:
    """How the tables of a rotary embedding lie; ``None`` if its forward is not known."""
    return None if is_wrapped(module) else formula("rotary_embedding", type(module).forward, type(module))


def _rotation(stock: Any, name: str, layouts: set[str | None]) -> tuple[str | None, str | None]:
    """(which dimensions make a pair, and how tables lie; why that is not known)"""
    function = inspect.unwrap(stock.forward).__globals__[name]
    pairs = formula("rotary", function)
    if pairs is None:
        return None, _unknown(None, function)
    needed = "interleaved" if pairs == "interleaved" else "half"
    return (pairs, None) if layouts == {needed} else (None, "its rotary embedding's forward is not known")


def loss(name: str, module: Any, stock: type[nn.Module], skip_logits: bool) -> Iterator[Step]:
    head = module.lm_head
    kind = formula("head", stock.forward, stock)
    reason = obstacle(module, stock)
    if not stock.__name__.endswith(("ForCausalLM", "LMHeadModel")):
        reason = "its loss is not that of a causal language model alone"
    elif _loss.other_loss(module):
        reason = _loss.other_loss(module)
    elif not all(map(is_own, _loss.registered_loss())):
        reason = _loss.OTHER_REGISTERED_LOSS
    elif type(head) is not nn.Linear:
        reason = f"its lm_head is a {described(head)}"
    elif kind in ("divided", "multiplied") and head.bias is not None:
        reason = "its lm_head has a bias, and its logits are scaled"
    else:
        reason = reason or obstacle(head, nn.Linear, {"it": head}) or _unknown(kind, stock.forward, stock)
    if reason or kind is None:
        yield Skipped(name or type(module).__name__, module, LOSS, reason or "")
        return
    yield _swap(name or type(module).__name__, module, (LOSS,), _loss.causal_lm, skip_logits, kind, base_of(module))
    yield _swap(f"{name}.lm_head".lstrip("."), head, (), _loss.head)


def _swap(name: str, module: nn.Module, ops: tuple[str, ...], recipe: Recipe, *options: Any) -> Swap:
    stock: Any = type(module)
    return Swap(name, module, fused_class(stock, ops, recipe, *options), ops)


def _unknown(kind: str | None, function: Callable[..., Any], owner: type | None = None) -> str | None:
    if kind is not None:
        return None
    inner: Any = inspect.unwrap(function)
    return f"{inner.__qualname__} is none that it was written for (digest {digest(function, owner)})"


def _no_op(activation: Any) -> str:
    return f"its activation is {described(activation)}, for which there is no op"
