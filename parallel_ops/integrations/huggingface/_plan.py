"""Selects the modules of a model whose forward is replaced, and the reasons for the others."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from parallel_ops.integrations.huggingface import _attention, _experts, _layers, _loss
from parallel_ops.integrations.huggingface._fused import Recipe, fused_class, has_local, obstacle, uses

OPS = ("norm", "activation", "rotary", "attention", "residual", "router", "experts", "loss")

# Packages of transformers.models, and the prefixes of their class names.
FAMILIES = {
    "gpt2": "GPT2",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "olmoe": "Olmoe",
}


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


def plan(model: nn.Module, ops: Collection[str], skip_logits: bool) -> list[Step]:
    """The steps for ``model``. Raises TypeError if it is, or contains, a model of another family."""
    models = [(name, m) for name, m in model.named_modules() if isinstance(m, PreTrainedModel)]
    unknown = [type(m).__name__ for _, m in models if _family(m) is None] or ([] if models else [type(model).__name__])
    if unknown:
        known = ", ".join(FAMILIES.values())
        raise TypeError(f"apply: model is or contains a {unknown[0]}, which is none of {known} of transformers")
    steps: list[Step] = []
    done: set[int] = set()
    for prefix, part in models:
        for name, module in part.named_modules(prefix=prefix):
            if id(module) not in done:
                done.add(id(module))
                steps += _steps(name, module, part.config, ops, skip_logits)
    return steps


def _family(module: nn.Module) -> tuple[type[nn.Module], str] | None:
    """The class of a known family that ``module`` is or inherits from, and its name without the prefix ("MLP")."""
    for cls in type(module).__mro__:
        package = cls.__module__.split(".")
        if package[:2] == ["transformers", "models"] and package[2] in FAMILIES:
            return cls, cls.__name__.removeprefix(FAMILIES[package[2]])
    return None


def _steps(name: str, module: nn.Module, config: Any, ops: Collection[str], skip_logits: bool) -> Iterator[Step]:
    family = _family(module)
    if family is None:
        if type(module) is nn.LayerNorm and "norm" in ops:
            yield _layer_norm(name, module)
        return
    stock, kind = family
    if kind in ("Block", "DecoderLayer") or (kind == "SparseMoeBlock" and not _has_separate_experts(module)):
        for child_name, child in module.named_children():
            if _family(child) is None and type(child) is not nn.LayerNorm:
                yield Skipped(
                    f"{name}.{child_name}", child, "any op", f"it is a {type(child).__name__}, which is not known"
                )
    plans: dict[str, tuple[str, Callable[..., Iterator[Step]]]] = {
        "RMSNorm": ("norm", _rms_norm),
        "MLP": ("activation", _gelu_mlp if hasattr(module, "c_fc") else _gated_mlp),
        "Block": ("residual", _block),
        "TopKRouter": ("router", _router),
        "Experts": ("experts", _experts_steps),
        "SparseMoeBlock": ("experts", _separate_experts),
    }
    if kind in ("Attention", "SdpaAttention"):
        yield from _attention_steps(name, module, stock, config, ops)
    elif hasattr(module, "lm_head") and "loss" in ops:
        yield from _loss_steps(name, module, stock, kind, skip_logits)
    elif kind in plans and plans[kind][0] in ops:
        yield from plans[kind][1](name, module, stock)


def _swap(name: str, module: nn.Module, ops: tuple[str, ...], recipe: Recipe, *options: Any) -> Swap:
    stock: Any = type(module)
    return Swap(name, module, fused_class(stock, recipe, *options), ops)


def _layer_norm(name: str, module: nn.LayerNorm) -> Step:
    reason = obstacle(module, nn.LayerNorm)
    if len(module.normalized_shape) != 1:
        reason = "it normalises several dimensions"
    return Skipped(name, module, "layer_norm", reason) if reason else _swap(name, module, ("layer_norm",), _layers.norm)


def _rms_norm(name: str, module: nn.Module, stock: type[nn.Module]) -> Iterator[Step]:
    reason = obstacle(module, stock)
    yield Skipped(name, module, "rms_norm", reason) if reason else _swap(name, module, ("rms_norm",), _layers.rms)


def _gated_mlp(name: str, module: Any, stock: type[nn.Module]) -> Iterator[Step]:
    activation = _layers.activation_of(module.act_fn)
    op = "gelu_mul" if activation in ("tanh", "none") else "silu_mul"
    reason = obstacle(module, stock, (module.act_fn,)) or _not_fused(activation, module.act_fn)
    yield Skipped(name, module, op, reason) if reason else _swap(name, module, (op,), _layers.gated_mlp, activation)


def _gelu_mlp(name: str, module: Any, stock: type[nn.Module]) -> Iterator[Step]:
    activation = _layers.activation_of(module.act)
    reason = obstacle(module, stock, (module.act,))
    reason = reason or _not_fused(None if activation == "silu" else activation, module.act)
    if reason:
        yield Skipped(name, module, "bias_gelu", reason)
        return
    yield _swap(name, module, ("bias_gelu",), _layers.gelu_mlp, activation)
    linear = module.c_fc
    if type(linear) is Conv1D and obstacle(linear, Conv1D, (linear,)) is None:
        yield _swap(f"{name}.c_fc", linear, (), _layers.transposed_linear)


def _not_fused(activation: str | None, module: nn.Module) -> str | None:
    return None if activation else f"its activation is {type(module).__name__}, for which there is no op"


def _block(name: str, module: Any, stock: type[nn.Module]) -> Iterator[Step]:
    dropouts = {"attn.resid_dropout": module.attn.resid_dropout, "mlp.dropout": module.mlp.dropout}
    reason = obstacle(module, stock)
    if hasattr(module, "crossattention"):
        reason = "it has cross-attention"
    for path, dropout in dropouts.items():
        parent = module.get_submodule(path.split(".")[0])
        family = _family(parent)
        if family is None or obstacle(parent, family[0]) or type(dropout) is not nn.Dropout:
            reason = f"its {path} is not what stock modules have"
    if reason:
        yield Skipped(name, module, "bias_dropout_add", reason)
        return
    yield _swap(name, module, ("bias_dropout_add",), _layers.gpt2_block)
    for path, dropout in dropouts.items():
        yield _swap(f"{name}.{path}", dropout, (), _layers.deferred_dropout)


def _has_separate_experts(module: Any) -> bool:
    """Whether a mixture of experts has a list of MLPs and a linear router, as before Transformers 5."""
    return isinstance(module.experts, nn.ModuleList)


def _router(name: str, module: nn.Module, stock: type[nn.Module]) -> Iterator[Step]:
    reason = obstacle(module, stock)
    if not has_local(stock.forward, "router_probs"):
        reason = "this version of Transformers returns probabilities as the router's logits"
    yield Skipped(name, module, "route", reason) if reason else _swap(name, module, ("route",), _experts.router)


def _experts_steps(name: str, module: Any, stock: type[nn.Module]) -> Iterator[Step]:
    activation = _layers.activation_of(module.act_fn)
    gated = "gelu_mul" if activation in ("tanh", "none") else "bias_swiglu"
    reason = obstacle(module, stock, (module.act_fn,)) or _not_fused(activation, module.act_fn)
    implementation = module.config._experts_implementation
    if implementation not in _experts.REPLACED:
        reason = f"the model is set to {implementation!r} experts; only 'grouped_mm' and 'eager' are replaced"
    if reason:
        yield Skipped(name, module, "grouped_linear", reason)
        return
    ops = ("sort_by_expert", "permute", "grouped_linear", gated, "unpermute")
    yield _swap(name, module, ops, _experts.experts, activation)


def _separate_experts(name: str, module: Any, stock: type[nn.Module]) -> Iterator[Step]:
    if _has_separate_experts(module):
        yield Skipped(name, module, "grouped_linear", "its experts have separate weights, as before Transformers 5")


def _attention_steps(
    name: str, module: nn.Module, stock: type[nn.Module], config: Any, ops: Collection[str]
) -> Iterator[Step]:
    reason = obstacle(module, stock)
    replaced: list[str] = []
    implementation = config._attn_implementation
    for role, used, op in (
        ("rotary", "apply_rotary_pos_emb", "rotary_embedding_qk"),
        ("attention", "ALL_ATTENTION_FUNCTIONS", "flash_attention"),
    ):
        if role not in ops or not uses(stock.forward, used):
            continue
        if reason:
            yield Skipped(name, module, op, reason)
        elif role == "attention" and implementation != "sdpa":
            yield Skipped(
                name, module, op, f"the model is set to {implementation!r} attention; only 'sdpa' is replaced"
            )
        else:
            replaced.append(op)
    if replaced:
        rotary, core = "rotary_embedding_qk" in replaced, "flash_attention" in replaced
        yield _swap(name, module, tuple(replaced), _attention.attention, rotary, core)


def _loss_steps(name: str, module: Any, stock: type[nn.Module], kind: str, skip_logits: bool) -> Iterator[Step]:
    op = "vocab_parallel_linear_cross_entropy"
    head = module.lm_head
    reason = obstacle(module, stock)
    if kind not in ("ForCausalLM", "LMHeadModel"):
        reason = "its loss is not that of a causal language model alone"
    elif hasattr(module, "_loss_function") or getattr(module, "loss_type", None) not in (None, "ForCausalLM"):
        reason = "it has a loss function of its own"
    elif type(head) is not nn.Linear:
        reason = f"its lm_head is a {type(head).__name__}"
    else:
        reason = reason or obstacle(head, nn.Linear, (head,))
    if reason:
        yield Skipped(name or type(module).__name__, module, op, reason)
        return
    yield _swap(name or type(module).__name__, module, (op,), _loss.causal_lm, skip_logits)
    yield _swap(f"{name}.lm_head".lstrip("."), head, (), _loss.head)
