"""Forwards of norms, MLPs and residual additions that call the ops. Each takes the stock class; see ``_fused``."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import activations

from parallel_ops.integrations.huggingface._fused import described, is_hooked, is_own, stock_class
from parallel_ops.integrations.huggingface._trial import Draw, stand_in, tried
from parallel_ops.integrations.huggingface._use import DEFERRED, went_to_stock
from parallel_ops.ops import bias_dropout_add, bias_gelu, bias_swiglu, gelu_mul, layer_norm, rms_norm, silu_mul


class Activation(NamedTuple):
    """The activation of an MLP or of experts.

    Attributes:
        name: its name there. kind: its class. formula: what it computes; "tanh" and "none" are GeLU as in bias_gelu.
    """

    name: str
    kind: type[nn.Module]
    formula: Literal["silu", "tanh", "none"]


def activation_of(owner: Any, name: str) -> Activation | None:
    """The activation ``name`` of ``owner``; ``None`` if there is no op for it."""
    module = getattr(owner, name)
    kind: Any = type(module)
    if kind not in (nn.SiLU, getattr(activations, kind.__name__, None)) or not is_own(kind.forward):
        return None
    ours: dict[Any, Callable[..., Tensor]] = {
        "silu": lambda _, x: F.silu(x),
        "tanh": lambda _, x: F.gelu(x, approximate="tanh"),
        "none": lambda _, x: F.gelu(x),
    }

    def activated(draw: Draw) -> tuple[Any, ...]:
        return stand_in(module, draw), draw.rows(7, 64)

    found: Any = tried(module, kind.forward, ours, activated)[0]
    return None if found is None else Activation(name, kind, found)


def other_activation(activation: Activation) -> Callable[[Any], str | None]:
    """A recipe's ``changed``: whether the activation, which an op computes, is not the module that it was."""
    name, kind, _ = activation
    forward = kind.forward

    def changed(module: Any) -> str | None:
        now = module._modules.get(name)
        if type(now) is not kind:
            return f"its activation is {described(now)} since"
        if kind.forward is not forward:
            return f"the forward of {kind.__name__} was replaced"
        return f"there are hooks on {name}, a {described(now)}" if is_hooked(now) else None

    return changed


# By what they compute, the forwards of norms.
NORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "rms": lambda self, x: rms_norm(x, self.weight, self.variance_epsilon),
    "rms_of_eps": lambda self, x: rms_norm(x, self.weight, self.eps),
    "rms_alone": lambda self, x: rms_norm(x, None, self.eps),
    "zero_centred_rms": lambda self, x: rms_norm(x, self.weight, self.eps, zero_centered=True),
    "olmo": lambda self, x: layer_norm(x, eps=1e-5),
    "cohere": lambda self, x: layer_norm(x, self.weight, eps=self.variance_epsilon),
    "torch": lambda self, x: layer_norm(x, self.weight, self.bias, self.eps),
}


def norm(stock: type[nn.Module], kind: str) -> dict[str, Any]:
    formula, op = NORMS[kind], "rms_norm" if "rms" in kind else "layer_norm"
    theirs = [*inspect.signature(inspect.unwrap(stock.forward)).parameters][1]

    def forward(self: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        if theirs in kwargs:  # stock classes have several names for it
            args = (*args, kwargs.pop(theirs))
        if args and isinstance(args[0], DTensor):  # as torch's SequenceParallel passes it
            went_to_stock(self, op, "got a DTensor")
            return stock.forward(self, *args, **kwargs)
        return formula(self, *args, **kwargs)

    return {"forward": forward}


def gated(both: Tensor, activation: Activation, weights: Tensor | None = None) -> Tensor:
    """The activation of the first half of the features times the second, and times ``weights`` of the rows."""
    if activation.formula == "silu":
        return bias_swiglu(both, weights=weights)
    gate, up = both.chunk(2, dim=-1)
    return gelu_mul(gate, up, approximate=activation.formula, weights=weights)


def gated_mlp(stock: type[nn.Module], activation: Activation, dropout: bool) -> dict[str, Any]:
    formula = activation.formula

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        y = self.down_proj(silu_mul(gate, up) if formula == "silu" else gelu_mul(gate, up, approximate=formula))
        return F.dropout(y, p=self.residual_dropout, training=self.training) if dropout else y

    return {"forward": forward, "changed": other_activation(activation)}


def gate_and_up_mlp(stock: type[nn.Module], activation: Activation, dropout: bool) -> dict[str, Any]:
    """Gate and up in one matrix, the gate first."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        y: Tensor = self.down_proj(gated(self.gate_up_proj(hidden_states), activation))
        return y

    return {"forward": forward, "changed": other_activation(activation)}


def gelu_mlp(stock: type[nn.Module], activation: Activation, dropout: bool) -> dict[str, Any]:
    """GeLU of one matrix. ``dropout``: whether by a number of the module, and not by a module of its own."""
    approximate = activation.formula

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if stock_class(self.c_fc) is None or is_hooked(self.c_fc):  # an adapter's or a quantised layer, a hook's input
            hidden_states = bias_gelu(self.c_fc(hidden_states), approximate=approximate)
        else:
            hidden_states = self.c_fc(hidden_states, gelu=approximate)
        y = self.c_proj(hidden_states)
        return F.dropout(y, p=self.residual_dropout, training=self.training) if dropout else self.dropout(y)

    return {"forward": forward, "changed": other_activation(activation)}


MLPS: dict[str, Callable[..., dict[str, Any]]] = {
    "gated": gated_mlp,
    "gated_dropout": gated_mlp,
    "gate_and_up": gate_and_up_mlp,
    "gelu": gelu_mlp,
    "gelu_dropout": gelu_mlp,
}


def linear(stock: type[nn.Module]) -> dict[str, Any]:
    """A linear, optionally followed by GeLU."""

    def forward(self: Any, input: Tensor, gelu: str | None = None) -> Tensor:
        if gelu is None:
            return stock.forward(self, input)
        return bias_gelu(F.linear(input, self.weight), self.bias, approximate=gelu)

    return {"forward": forward}


def transposed_linear(stock: type[nn.Module]) -> dict[str, Any]:
    """Transformers' ``Conv1D``, which stores its weight as ``[in, out]``, optionally followed by GeLU."""

    def forward(self: Any, x: Tensor, gelu: str | None = None) -> Tensor:
        if gelu is None:
            return stock.forward(self, x)
        product = torch.mm(x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)
        return bias_gelu(product, self.bias, approximate=gelu)

    return {"forward": forward}


def deferred_dropout(stock: type[nn.Module]) -> dict[str, Any]:
    """A dropout that the following residual addition applies instead, in a call of its block."""

    def forward(self: Any, input: Tensor) -> Tensor:
        return input if self._parallel_ops_deferred else stock.forward(self, input)

    return {"forward": forward, DEFERRED: False}


def gpt2_block(stock: type[nn.Module]) -> dict[str, Any]:
    """A block without cross-attention, whose residual additions apply the dropouts before them."""
    names = [*inspect.signature(stock.forward).parameters][2:]

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for name in ("encoder_hidden_states", "encoder_attention_mask"):
            if given.pop(name, None) is not None:
                raise ValueError(f"{name}: this block has no cross-attention (config.add_cross_attention is False)")
        attn, mlp = self.attn, self.mlp
        with _Deferred(attn.resid_dropout):
            mixed, *rest = attn(self.ln_1(hidden_states), **given)
        hidden_states = _add(attn.resid_dropout, mixed, hidden_states)
        with _Deferred(mlp.dropout):
            mixed = mlp(self.ln_2(hidden_states))
        hidden_states = _add(mlp.dropout, mixed, hidden_states)
        if "output_attentions" not in names:  # since 5.0
            return hidden_states
        if "layer_past" in names:  # before 4.53: the keys and values, then the probabilities
            return (hidden_states, *(rest if given.get("use_cache") else rest[1:]))
        return (hidden_states, *(rest if given.get("output_attentions") else ()))

    return {"forward": forward, "changed": _without_its_dropouts}


def _without_its_dropouts(block: Any) -> str | None:
    for name, dropout in (("attn", "resid_dropout"), ("mlp", "dropout")):
        parent = block._modules[name]
        child = parent._modules.get(dropout)
        if child is None or stock_class(child) is None:
            return f"its {name} is a {described(parent)} with another dropout since"
        if is_hooked(parent) or is_hooked(child):
            return f"there are hooks on {name} or its {dropout}, which must see what dropout leaves"
    return None


class _Deferred:
    """Calls of a dropout within return their input."""

    def __init__(self, dropout: Any) -> None:
        self.dropout = dropout

    def __enter__(self) -> None:
        self.dropout._parallel_ops_deferred = True

    def __exit__(self, *_: object) -> None:
        self.dropout._parallel_ops_deferred = False


def _add(dropout: nn.Dropout, x: Tensor, residual: Tensor) -> Tensor:
    return bias_dropout_add(x, None, residual, dropout.p, training=dropout.training)
