"""The ops of one device in each of their forms: functions of tensors, their references, and inputs of any size."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from parallel_ops import (
    bias_dropout_add,
    bias_gelu,
    bias_swiglu,
    gelu_mul,
    layer_norm,
    ops,
    permute,
    rms_norm,
    rotary_embedding,
    scaled_causal_softmax,
    scaled_masked_softmax,
    silu_mul,
    sort_by_expert,
    unpermute,
)
from support.numerics.experts import random_experts
from support.numerics.suite import angles, randn


class Form(NamedTuple):
    """A function of positional arguments, its reference, and arguments from the shape of an output, dtype and device.

    Attributes:
        layouts: the arguments whose strides may be any.
        leaves_dtypes: whether autocast changes nothing.
    """

    op: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[..., list[Any]]
    layouts: tuple[int, ...] = (0,)
    leaves_dtypes: bool = False


def form(f, inputs, layouts=(0,), *, last=None, leaves_dtypes=False, **options):
    """``last``: the keyword that the last argument has."""

    def positional(function):
        if last is None:
            return functools.partial(function, **options)
        return lambda *args: function(*args[:-1], **{last: args[-1]}, **options)

    reference = getattr(ops, f"{f.__name__}_reference")
    return Form(positional(f), positional(reference), inputs, layouts, leaves_dtypes)


# Shapes of arguments, from that of an output.
SAME, LAST, ROWS = lambda s: s, lambda s: s[-1:], lambda s: s[:-1]
TWICE, LAST_TWICE = lambda s: (*s[:-1], 2 * s[-1]), lambda s: (2 * s[-1],)


def of(*parts):
    return lambda shape, **options: [
        None if part is None else randn(*part(shape), seed=i, **options) for i, part in enumerate(parts)
    ]


def sinks(shape):
    """One for each head."""
    return shape[-3:-2] or (1,)


def with_mask(kind):
    def inputs(shape, *, device, **options):
        if kind is None:
            return [randn(*shape, device=device, **options), None]
        hidden = (torch.arange(shape[0] * shape[-1]) % 5 < 2).view(shape[0], *(1 for _ in shape[2:]), shape[-1])
        mask = hidden if kind == "bool" else torch.where(hidden, -torch.inf, hidden.cumsum(-1) / 8)
        return [randn(*shape, device=device, **options), mask.to(device)]

    return inputs


def heads(shape, *, positions=False, **options):
    """x, cos and sin, and perhaps positions, where the last dimension of ``shape`` is that of a head."""
    x, dtype = randn(*shape[:-1], 2, shape[-1], **options), torch.promote_types(options["dtype"], torch.float32)
    tables = angles(shape[0] + 3, min(shape[-1] // 2, 32), device=options["device"], dtype=dtype)
    return [x, *tables, *([torch.arange(shape[0], device=options["device"]).flip(0)] if positions else [])]


def of_rows(shape, **options):
    """x, a bias, no residual, and the places of the rows of x."""
    return [*of(SAME, LAST, None)(shape, **options), torch.arange(shape[0], device=options["device"]).flip(0)]


def tokens(weighted):
    """Tokens, the weights of their two experts, and the experts."""

    def inputs(shape, *, device, dtype, **options):
        rows = math.prod(shape[:-1])
        x = randn(rows, shape[-1], dtype=dtype, device=device, **options)
        weights = randn(rows, 2, dtype=torch.promote_types(dtype, torch.float32), device=device, seed=1)
        return [x, weights if weighted else None, random_experts(rows, 2, 8, device=device)]

    return inputs


def to_experts_and_back(there, back):
    def run(x, weights, experts):
        order = sort_by_expert(experts, 8, multiple=2)
        return back(there(x, order) * 2, order, weights)

    return run


def norm(f, residual=False, **options):
    shapes = [SAME, *[LAST] * (2 if f is layer_norm else 1), *[SAME] * residual]
    return form(f, of(*shapes), tuple(range(len(shapes))), last="residual" if residual else None, **options)


def gated(f, **options):
    return form(f, of(SAME, SAME, ROWS), (0, 1), last="weights", **options)


def permutation(*layouts, weighted):
    functions = (permute, unpermute), (ops.permute_reference, ops.unpermute_reference)
    return Form(*(to_experts_and_back(*both) for both in functions), tokens(weighted), layouts, leaves_dtypes=True)


GPT_OSS = {"alpha": 1.702, "limit": 1.5, "up_offset": 1.0}  # but for a limit that is reached often
dropout = functools.partial(form, bias_dropout_add, dropout_seed=2**40, index_offset=5)
causal = functools.partial(form, scaled_causal_softmax, leaves_dtypes=True)
masked = functools.partial(form, scaled_masked_softmax, leaves_dtypes=True)
rotary = functools.partial(form, rotary_embedding, leaves_dtypes=True)
NORMS = (layer_norm, rms_norm)

FORMS = {
    "bias_gelu": form(bias_gelu, of(SAME, LAST), (0, 1)),
    "bias_swiglu": form(bias_swiglu, of(TWICE, LAST_TWICE), (0, 1)),
    "silu_mul": gated(silu_mul),
    "gelu_mul": gated(gelu_mul),
    **{f.__name__: norm(f) for f in NORMS},
    **{f"{f.__name__} with a residual": norm(f, True) for f in NORMS},
    "bias_dropout_add": dropout(of(SAME, LAST, SAME), (0, 1, 2), dropout_p=0.3),
    "bias_dropout_add, p = 0": dropout(of(SAME, LAST, SAME), (0, 1, 2), dropout_p=0.0),
    "scaled_causal_softmax": causal(of(SAME), scale=0.7),
    "scaled_causal_softmax in a window": causal(of(SAME), window=3),
    "scaled_masked_softmax": masked(with_mask("bool"), scale=0.7),
    "scaled_masked_softmax, additive": masked(with_mask("additive")),
    "scaled_masked_softmax in a window": masked(with_mask(None), window=(1, 2)),
    "rotary_embedding": rotary(heads),
    "rotary_embedding of positions": rotary(functools.partial(heads, positions=True), last="positions"),
    "permute and unpermute": permutation(0, 1, weighted=True),
}
# Compiled as those above are.
VARIANTS = {
    "bias_gelu without a bias": form(bias_gelu, of(SAME)),
    "bias_gelu, exact": form(bias_gelu, of(SAME, LAST), approximate="none"),
    "bias_gelu without a bias, exact": form(bias_gelu, of(SAME), approximate="none"),
    "bias_swiglu without a bias": form(bias_swiglu, of(TWICE)),
    "bias_swiglu of gpt-oss": form(bias_swiglu, of(TWICE, LAST_TWICE, ROWS), (0, 1), last="weights", **GPT_OSS),
    "bias_swiglu, gate and up in turn": form(bias_swiglu, of(TWICE), interleaved=True, limit=1.0),
    "silu_mul of gpt-oss": gated(silu_mul, **GPT_OSS),
    "gelu_mul, exact": gated(gelu_mul, approximate="none"),
    "silu_mul without weights": form(silu_mul, of(SAME, SAME), (0, 1)),
    "silu_mul of gpt-oss without weights": form(silu_mul, of(SAME, SAME), (0, 1), **GPT_OSS),
    "gelu_mul without weights": form(gelu_mul, of(SAME, SAME), (0, 1)),
    "gelu_mul without weights, exact": form(gelu_mul, of(SAME, SAME), (0, 1), approximate="none"),
    **{f"{f.__name__}, zero-centred": norm(f, zero_centered=True) for f in NORMS},
    **{f"{f.__name__} with a residual, zero-centred": norm(f, True, zero_centered=True) for f in NORMS},
    "bias_dropout_add, p = 1": dropout(of(SAME, LAST, SAME), (0, 1, 2), dropout_p=1.0),
    "bias_dropout_add of rows from anywhere": dropout(of_rows, last="row_positions", dropout_p=0.3),
    **{
        f"bias_dropout_add without a bias, p = {p}": dropout(of(SAME, None, SAME), (0, 2), dropout_p=p)
        for p in (0.3, 0.0, 1.0)
    },
    **{f"scaled_causal_softmax, {n} keys": causal(of(SAME), window=n) for n in (1, 1000)},
    "scaled_causal_softmax with sinks": causal(of(SAME, sinks), last="sink"),
    "scaled_masked_softmax without a mask": masked(with_mask(None)),
    "scaled_masked_softmax with sinks, a learned mask": masked(of(SAME, LAST, sinks), last="sink", scale=0.7),
    "rotary_embedding, interleaved": rotary(heads, interleaved=True),
    "permute and unpermute without weights": permutation(0, weighted=False),
}
EVERY = FORMS | VARIANTS
