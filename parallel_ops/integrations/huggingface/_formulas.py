"""What is tried of each role (``_trial.py``), and the forwards of ours that are tried beside it.

| role | formulas |
|---|---|
| ``norm`` | RMSNorm; without weight; with ``1 + weight``; LayerNorm without weight, eps 1e-5; with weight; with both |
| ``mlp`` | gate and up apart, or in one matrix; GeLU of one matrix; each with or without dropout at the end |
| ``rotation`` | pairs ``(i, R / 2 + i)`` or ``(2i, 2i + 1)``, each also by tables of half the width |
| ``tables`` | each angle twice, ``(a, b, a, b)`` or ``(a, a, b, b)``, or once |
| ``core`` | causal attention over the whole sequence, with as many keys as queries or fewer heads |
| ``head`` | logits as they are, divided or multiplied by a factor, softly capped; a mixture of experts |
| ``router`` | softmax, then top k, or the other way |
| ``experts`` | stacked weights, each expert gated; those of gpt-oss; Llama 4's, in ``_weighted_inputs.py`` |
| ``block`` | GPT-2's two residual additions |
"""

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, MoeModelOutputWithPast

from parallel_ops.integrations.huggingface import _attention, _experts, _layers, _loss
from parallel_ops.integrations.huggingface._families import base_of
from parallel_ops.integrations.huggingface._trial import Draw, Verdict, stand_in, tried, undisturbed

HIDDEN, INNER = 6, 10
SIZES = {"hidden_size": HIDDEN, "hidden_dim": HIDDEN, "intermediate_size": INNER, "intermediate_dim": INNER}
_SHAPES = {  # out, in
    "gate_proj": (INNER, HIDDEN),
    "up_proj": (INNER, HIDDEN),
    "gate_up_proj": (2 * INNER, HIDDEN),
    "down_proj": (HIDDEN, INNER),
    "c_fc": (INNER, HIDDEN),
    "c_proj": (HIDDEN, INNER),
}


class _Linear:
    """A linear, and an output projection as ``_loss.head`` makes it, without the hooks of modules."""

    _head = staticmethod(_loss.head(nn.Linear)["forward"])

    def __init__(self, draw: Draw, out: int, into: int, bias: bool = True) -> None:
        self.weight, self.bias = draw(out, into), draw(out) if bias else None

    def __call__(self, x: Tensor, **options: Any) -> Tensor:
        made: Tensor = self._head(self, x, **options)
        return made


def norm(module: Any) -> Verdict:
    def norms(draw: Draw) -> tuple[Any, ...]:
        weights = {name: None if p is None else draw(*p.shape) for name, p in module._parameters.items()}
        widths = [w.shape[-1] for w in weights.values() if w is not None]
        widths = widths or list(getattr(module, "normalized_shape", [HIDDEN]))
        return stand_in(module, draw, **weights), draw.rows(2, 5, widths[-1])

    return tried(module, type(module).forward, _layers.NORMS, norms)


def mlp(module: Any, activation: _layers.Activation) -> Verdict:
    act = getattr(module, activation.name)

    def mlps(draw: Draw) -> tuple[Any, ...]:
        children: dict[str, Any] = {n: _Linear(draw, *_SHAPES[n]) for n in module._modules if n in _SHAPES}
        if "dropout" in module._modules:
            children["dropout"] = lambda x: F.dropout(x, 0.3, draw.training)
        children[activation.name] = type(act).forward.__get__(copy.copy(act))
        return stand_in(module, draw, **children, **SIZES), draw.rows(2, 5, HIDDEN)

    ours = {
        kind: recipe(type(module), activation, kind.endswith("dropout"))["forward"]
        for kind, recipe in _layers.MLPS.items()
    }
    return tried(module, type(module).forward, ours, mlps, activation)


def router(module: Any) -> Verdict:
    def routers(draw: Draw) -> tuple[Any, ...]:
        n = int(module.top_k) + 3
        bias = {"bias": draw(n)} if "bias" in module._parameters else {}
        made = stand_in(module, draw, weight=draw(n, HIDDEN), num_experts=n, **bias, **SIZES)
        return made, draw(10, HIDDEN)

    stock = type(module)
    kinds = ("top_k_softmax",) if "bias" in module._parameters else ("softmax_top_k",)
    return tried(module, stock.forward, {kind: _experts.router(stock, kind)["forward"] for kind in kinds}, routers)


def experts(module: Any, activation: _layers.Activation | None) -> Verdict:
    interleaved = "gate_up_proj_bias" in module._parameters

    def stacked(draw: Draw) -> tuple[Any, ...]:
        if interleaved:
            weights = {"gate_up_proj": draw(5, HIDDEN, 2 * INNER), "down_proj": draw(5, INNER, HIDDEN)}
            weights |= {"gate_up_proj_bias": draw(5, 2 * INNER), "down_proj_bias": draw(5, HIDDEN)}
            made = stand_in(module, draw, **weights, **SIZES, num_experts=5)
        else:
            act = type(module.act_fn).forward.__get__(copy.copy(module.act_fn))
            weights = {"gate_up_proj": draw(5, 2 * INNER, HIDDEN), "down_proj": draw(5, HIDDEN, INNER)}
            made = stand_in(module, draw, **weights, **SIZES, num_experts=5, act_fn=act, _is_expert_parallel=False)
        if "config" in vars(made):
            made.config.__dict__["_experts_implementation_internal"] = "eager"
        return made, draw.rows(7, HIDDEN), draw.integers(4, 7, 2), draw(7, 2)

    kind = "interleaved" if interleaved else "stacked"
    ours = _experts.EXPERTS[kind](type(module), activation)["forward"]
    return tried(module, type(module).forward, {kind: ours}, stacked, activation)


def block(module: Any) -> Verdict:
    names = inspect.signature(type(module).forward).parameters

    def blocks(draw: Draw) -> tuple[Any, ...]:
        dropout = SimpleNamespace(p=0.0, training=draw.training)
        children = {}
        for name in ("ln_1", "ln_2", "attn", "mlp"):
            children[name] = _Child(draw(5), dropout)
        children["attn"].others = 2 if "layer_past" in names else 1
        return stand_in(module, draw, **children), draw.rows(2, 4, 5), draw.constant(2, 4, 5)

    def called(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(made: Any, x: Tensor, mask: Tensor) -> Any:
            attentions = {"output_attentions": True} if "output_attentions" in names else {}
            calls: tuple[dict[str, Any], ...] = ({}, {"attention_mask": mask}, {"use_cache": True}, attentions)
            return [forward(made, x, **given) for given in calls]

        call.__qualname__ = forward.__qualname__
        return call

    own = type(module).forward
    return tried(module, called(own), {"gpt2": called(_layers.gpt2_block(type(module))["forward"])}, blocks)


class _Child:
    """A norm, an attention (if it has ``others`` to return) or an MLP of a block."""

    others = 0

    def __init__(self, weight: Tensor, dropout: Any) -> None:
        self.weight, self.dropout, self.resid_dropout = weight, dropout, dropout

    def __call__(self, x: Tensor, **given: Any) -> Any:
        y = (x * self.weight).sin() + sum(v for v in given.values() if isinstance(v, Tensor))
        return (y, *(x * (i + 2) for i in range(self.others))) if self.others else y


@dataclass
class _Outputs(BaseModelOutputWithPastAndCrossAttentions):
    """What a base model may return beside the hidden state."""

    router_logits: Any = None
    shared_kv_states: Any = None


def head(module: Any) -> Verdict:
    stock, base = type(module), base_of(module)
    # Others, such as DeepSeek-V3, have the option of a common base and no auxiliary loss.
    mixture = hasattr(module.config, "output_router_logits") and hasattr(module, "num_experts")

    def heads(draw: Draw) -> tuple[Any, ...]:
        hidden, vocab = draw(2, 5, HIDDEN), 11
        if mixture:
            routers: Any = tuple(draw(10, module.num_experts) for _ in range(2))
            outputs: Any = MoeModelOutputWithPast(last_hidden_state=hidden, router_logits=routers)
        else:
            outputs = _Outputs(last_hidden_state=hidden)
        projection = _Linear(draw, vocab, HIDDEN, bias=False)
        parts = {"lm_head": projection, base: lambda *_, **__: outputs}
        made = stand_in(module, draw, **parts, vocab_size=vocab, loss_type="ForCausalLM")  # its default warns
        made.config.__dict__["vocab_size"] = vocab
        return made, draw.integers(vocab, 2, 5)

    def called(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(made: Any, labels: Tensor) -> list[Any]:
            some = labels.clone()
            some[0, :3] = -100
            cases: list[dict[str, Any]] = [{"labels": labels}, {"labels": some, "num_items_in_batch": 7}]
            if mixture:
                cases += [c | {"output_router_logits": True, "attention_mask": (some >= 0).long()} for c in cases]
            found = [forward(made, input_ids=labels, **case) for case in cases]
            return [(outputs.loss, getattr(outputs, "aux_loss", None)) for outputs in found]

        call.__qualname__ = stock.forward.__qualname__
        return call

    def ours(kind: str) -> Callable[..., Any]:
        return called(lambda made, **given: _loss.without_logits(made, given, stock, kind, base))

    return tried(module, called(stock.forward), {kind: ours(kind) for kind in _loss.KINDS}, heads)


def rotation(function: Callable[..., Any]) -> Verdict:
    """Of the whole head and, where ``function`` takes that, of a part; tables for each sequence and for all."""

    def tables(draw: Draw, batch: int, width: int, kind: str) -> tuple[Tensor, Tensor]:
        both = draw.constant(2, batch, 5, width // 2)
        if kind == "half_by_single_tables":
            return both[0], both[1]
        twice = both.repeat_interleave(2, -1) if kind == "interleaved" else torch.cat((both, both), -1)
        return twice[0], twice[1]

    found: Verdict = (None, "")
    for kind in _attention.PAIRS:

        def whole(draw: Draw, kind: str = kind) -> tuple[Any, ...]:
            return draw(2, 4, 5, 8), draw(2, 2, 5, 8), *tables(draw, 2, 8, kind)

        def part(draw: Draw, kind: str = kind) -> tuple[Any, ...]:
            return draw(2, 4, 5, 8), draw(2, 2, 5, 8), *tables(draw, 1, 4, kind)

        ours = {kind: functools.partial(_attention.rotated, pairs=kind)}
        found = tried(None, function, ours, whole, kind)
        if found[0] is not None:
            partial = tried(None, function, ours, part, kind)
            return found if partial[0] or "its results are others" not in partial[1] else partial
    return found


def core(sdpa: Callable[..., Any]) -> Verdict:
    def heads(draw: Draw) -> tuple[Any, ...]:
        module = SimpleNamespace(is_causal=True, num_key_value_groups=2, training=draw.training)
        return module, draw(2, 4, 5, 8), draw(2, 2, 5, 8), draw(2, 2, 5, 8), None, 0.0, 0.3

    return tried(None, sdpa, {"causal": _attention.with_core(sdpa)}, heads)


def sinks(eager: Callable[..., Any]) -> Verdict:
    """Attention with sinks, causal and within a window."""

    def heads(draw: Draw) -> tuple[Any, ...]:
        window, rows = 3 if draw.training else None, torch.arange(6)
        distance = rows[:, None] - rows
        seen = (distance >= 0) & (distance < (window or 6))
        mask = draw.constant(1, 1, 6, 6).zero_().masked_fill_(~seen, torch.finfo(torch.float64).min)
        module = SimpleNamespace(sinks=draw(4), num_key_value_groups=2, training=draw.training, config=None)
        return module, draw(2, 4, 6, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 4), mask, 0.3, window

    return tried(None, _result(eager), {"sinks": _result(_attention.with_sinks(eager))}, heads)


@functools.cache
def _result(attention: Callable[..., Any]) -> Callable[..., Any]:
    """``attention`` without the weights that it may return, and with its window as last argument."""

    @functools.wraps(attention)
    def first(*given: Any) -> Any:
        return attention(*given[:-1], sliding_window=given[-1])[0]

    return first


def tables(module: Any) -> str | None:
    """How the tables of a rotary embedding lie: "half", "interleaved" or "single"; ``None`` if that depends."""
    forward = type(module).forward
    names = [*inspect.signature(forward).parameters][1:]
    layers = sorted(set(module.config.layer_types)) if "layer_type" in names else [None]
    layouts: set[str] = set()
    with undisturbed():
        draw = Draw(False, False)
        held = {**vars(module), **module._buffers}
        inverse = {n: draw.constant(*t.shape).float() for n, t in held.items() if isinstance(t, Tensor)}
        for layer in layers:
            for positions in (torch.arange(1, 6)[None], torch.arange(1, 16).view(3, 1, 5)):
                try:
                    made = stand_in(module, draw)
                    made._buffers.update(inverse)
                    found = forward(made, draw.constant(1), positions, *([] if layer is None else [layer]))
                except Exception:
                    continue
                layouts.add(_layout(found))
    return layouts.pop() if len(layouts) == 1 else None


def _layout(found: Any) -> str:
    """``"single"`` for tables that have each angle once."""
    if all(torch.equal(*t.chunk(2, -1)) for t in found):
        return "half"
    return "interleaved" if all(torch.equal(t[..., ::2], t[..., 1::2]) for t in found) else "single"
