"""Forwards of norms, MLPs and residual additions that call the ops. Each takes the stock class; see ``_fused``."""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import activations

from parallel_ops.integrations.huggingface._fused import described, is_hooked, is_own, stock_class
from parallel_ops.integrations.huggingface._trial import Draw, stand_in, tried
from parallel_ops.integrations.huggingface._use import DEFERRED
from parallel_ops.ops import bias_dropout_add, bias_gelu, bias_swiglu, gelu_mul, layer_norm, rms_norm, silu_mul

Activation = Literal["silu", "tanh", "none"]
Watch = tuple[str, type[nn.Module]]  # the name of the activation in its module, and its class


def activation_of(module: Any) -> Activation | None:
    """The activation that ``module`` computes, "tanh" and "none" being GeLU as in bias_gelu; ``None`` if there is no op
    for it."""
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
    return found


def other_activation(name: str, kind: type[nn.Module]) -> Callable[[Any], str | None]:
    """A recipe's ``changed``: whether the module ``name``, which an op computes, is not the ``kind`` that it was."""
    forward = kind.forward

    def changed(module: Any) -> str | None:
        now = module._modules.get(name)
        if type(now) is not kind:
            return f"its activation is {described(now)} since"
        if kind.forward is not forward:
            return f"the forward of {kind.__name__} was replaced"
        return f"there are hooks on {name}, a {described(now)}" if is_hooked(now) else None

    return changed


def norm(stock: type[nn.Module], kind: str) -> dict[str, Any]:
    """``kind``: the name of one of the functions in it."""

    def rms(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.variance_epsilon)

    def rms_of_eps(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def rms_alone(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x, None, self.eps)

    def zero_centred_rms(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, zero_centered=True)

    def olmo(self: Any, x: Tensor) -> Tensor:
        return layer_norm(x, eps=1e-5)

    def cohere(self: Any, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, eps=self.variance_epsilon)

    def torch(self: Any, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    every = (rms, rms_of_eps, rms_alone, zero_centred_rms, olmo, cohere, torch)
    return {"forward": {f.__name__: f for f in every}[kind]}


def gated_mlp(stock: type[nn.Module], activation: Activation, watch: Watch, dropout: bool) -> dict[str, Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        y = self.down_proj(silu_mul(gate, up) if activation == "silu" else gelu_mul(gate, up, approximate=activation))
        return F.dropout(y, p=self.residual_dropout, training=self.training) if dropout else y

    return {"forward": forward, "changed": other_activation(*watch)}


def gate_and_up_mlp(stock: type[nn.Module], activation: Activation, watch: Watch, dropout: bool) -> dict[str, Any]:
    """Gate and up in one matrix, the gate first."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        both = self.gate_up_proj(hidden_states)
        if activation == "silu":
            return self.down_proj(bias_swiglu(both))
        gate, up = both.chunk(2, dim=-1)
        return self.down_proj(gelu_mul(gate, up, approximate=activation))

    return {"forward": forward, "changed": other_activation(*watch)}


def gelu_mlp(stock: type[nn.Module], approximate: Activation, watch: Watch, dropout: bool) -> dict[str, Any]:
    """``dropout``: whether by a number of the module, and not by a module of its own."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if stock_class(self.c_fc) is None or is_hooked(self.c_fc):  # an adapter's or a quantised layer, a hook's input
            hidden_states = bias_gelu(self.c_fc(hidden_states), approximate=approximate)
        else:
            hidden_states = self.c_fc(hidden_states, gelu=approximate)
        y = self.c_proj(hidden_states)
        return F.dropout(y, p=self.residual_dropout, training=self.training) if dropout else self.dropout(y)

    return {"forward": forward, "changed": other_activation(*watch)}


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
