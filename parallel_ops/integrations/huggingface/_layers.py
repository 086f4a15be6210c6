"""Forwards of norms, MLPs and residual additions that call the ops. Each takes the stock class; see ``_fused``."""

import inspect
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import activations

from parallel_ops.integrations.huggingface._fused import stock_class
from parallel_ops.ops import bias_dropout_add, bias_gelu, bias_swiglu, gelu_mul, layer_norm, rms_norm, silu_mul

Activation = Literal["silu", "tanh", "none"]

# The op's activation for each class: "tanh" and "none" are GeLU, as in bias_gelu. Versions differ in classes.
_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "NewGELUActivation": "tanh",
    "FastGELUActivation": "tanh",
    "AccurateGELUActivation": "tanh",
    "GELUTanh": "tanh",
    "PytorchGELUTanh": "tanh",
    "GELUActivation": "none",
}


def activation_of(module: nn.Module) -> Activation | None:
    """The activation that ``module`` computes; ``None`` if there is no op for it."""
    kind: Any = type(module)
    if kind not in (nn.SiLU, getattr(activations, kind.__name__, None)):
        return None
    return _ACTIVATIONS.get(kind.__name__)


def norm(stock: type[nn.Module], kind: str) -> dict[str, Any]:
    """``kind``: a formula of ``_known.py``, or "torch" for ``nn.LayerNorm``."""

    def rms(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.variance_epsilon)

    def zero_centred_rms(self: Any, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, zero_centered=True)

    def olmo(self: Any, x: Tensor) -> Tensor:
        return layer_norm(x, eps=1e-5)

    def cohere(self: Any, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, eps=self.variance_epsilon)

    def torch(self: Any, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    return {"forward": {f.__name__: f for f in (rms, zero_centred_rms, olmo, cohere, torch)}[kind]}


def gated_mlp(stock: type[nn.Module], activation: Activation, dropout: bool) -> dict[str, Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        y = self.down_proj(silu_mul(gate, up) if activation == "silu" else gelu_mul(gate, up, approximate=activation))
        return F.dropout(y, p=self.residual_dropout, training=self.training) if dropout else y

    return {"forward": forward}


def gate_and_up_mlp(stock: type[nn.Module], activation: Activation, dropout: bool) -> dict[str, Any]:
    """Gate and up in one matrix, the gate first."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        both = self.gate_up_proj(hidden_states)
        if activation == "silu":
            return self.down_proj(bias_swiglu(both))
        gate, up = both.chunk(2, dim=-1)
        return self.down_proj(gelu_mul(gate, up, approximate=activation))

    return {"forward": forward}


def gelu_mlp(stock: type[nn.Module], approximate: Activation, dropout: bool) -> dict[str, Any]:
    """``dropout``: whether by a number of the module, and not by a module of its own."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if stock_class(self.c_fc) is None:  # an adapter's or a quantised layer
            hidden_states = bias_gelu(self.c_fc(hidden_states), approximate=approximate)
        else:
            hidden_states = self.c_fc(hidden_states, gelu=approximate)
        y = self.c_proj(hidden_states)
        return F.dropout(y, p=self.residual_dropout, training=self.training) if dropout else self.dropout(y)

    return {"forward": forward}


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
    """A dropout that the following residual addition applies instead."""

    def forward(self: Any, input: Tensor) -> Tensor:
        return input

    return {"forward": forward}


def gpt2_block(stock: type[nn.Module]) -> dict[str, Any]:
    """A block without cross-attention, whose residual additions apply the dropouts before them."""
    names = [*inspect.signature(stock.forward).parameters][2:]

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for name in ("encoder_hidden_states", "encoder_attention_mask"):
            if given.pop(name, None) is not None:
                raise ValueError(f"{name}: this block has no cross-attention (config.add_cross_attention is False)")
        mixed, *rest = self.attn(self.ln_1(hidden_states), **given)
        hidden_states = _add(self.attn.resid_dropout, mixed, hidden_states)
        hidden_states = _add(self.mlp.dropout, self.mlp(self.ln_2(hidden_states)), hidden_states)
        if "output_attentions" not in names:  # since 5.0
            return hidden_states
        if "layer_past" in names:  # before 4.53: the keys and values, then the probabilities
            return (hidden_states, *(rest if given.get("use_cache") else rest[1:]))
        return (hidden_states, *(rest if given.get("output_attentions") else ()))

    return {"forward": forward}


def _add(dropout: nn.Dropout, x: Tensor, residual: Tensor) -> Tensor:
    if stock_class(dropout) is None:  # replaced by another module since, which has applied dropout
        return residual + x
    return bias_dropout_add(x, None, residual, dropout.p, training=dropout.training)
