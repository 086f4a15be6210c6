"""What every op of one device promises beside its numerics: one table of calls, one test for each promise."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from parallel_ops import (
    bias_dropout_add,
    bias_gelu,
    bias_swiglu,
    gelu_mul,
    layer_norm,
    permute,
    rms_norm,
    rotary_embedding,
    scaled_causal_softmax,
    scaled_masked_softmax,
    silu_mul,
    sort_by_expert,
    unpermute,
)
from support.numerics import suite
from support.numerics.experts import random_experts
from support.numerics.rotary import angles
from support.numerics.suite import DEVICES, randn

pytestmark = pytest.mark.parametrize("device", DEVICES)


GPT_OSS = {"alpha": 1.702, "limit": 1.5, "up_offset": 1.0}  # but for a limit that is reached often


class Call(NamedTuple):
    """A function and its arguments, from the shape of an output, a dtype and a device.

    ``layouts``: the arguments whose strides may be any.
    """

    op: Callable[..., Any]
    inputs: Callable[..., list[Any]]
    layouts: tuple[int, ...] = (0,)


# Shapes of arguments, from that of an output.
SAME, LAST, ROWS = lambda s: s, lambda s: s[-1:], lambda s: s[:-1]
TWICE, LAST_TWICE = lambda s: (*s[:-1], 2 * s[-1]), lambda s: (2 * s[-1],)


def of(*parts):
    return lambda shape, **options: [
        None if part is None else randn(*part(shape), seed=i, **options) for i, part in enumerate(parts)
    ]


def with_mask(kind):
    def inputs(shape, *, device, **options):
        if kind is None:
            return [randn(*shape, device=device, **options), None]
        hidden = (torch.arange(shape[0] * shape[-1]) % 5 < 2).view(shape[0], *(1 for _ in shape[2:]), shape[-1])
        mask = hidden if kind == "bool" else torch.where(hidden, -torch.inf, hidden.cumsum(-1) / 8)
        return [randn(*shape, device=device, **options), mask.to(device)]

    return inputs


def heads(shape, *, device, dtype, positions=False):
    """x, cos and sin, and perhaps positions, where the last dimension of ``shape`` is that of a head."""
    x = randn(*shape[:-1], 2, shape[-1], device=device, dtype=dtype)
    half = min(shape[-1] // 2, 32)
    tables = angles(shape[0] + 3, half, device=device, dtype=torch.promote_types(dtype, torch.float32))
    return [x, *tables, *([torch.arange(shape[0], device=device).flip(0)] if positions else [])]


def tokens(shape, *, device, dtype):
    """Tokens, weights of their two experts, and the experts."""
    rows = math.prod(shape[:-1])
    weights = randn(rows, 2, dtype=torch.promote_types(dtype, torch.float32), device=device, seed=1)
    return [randn(rows, shape[-1], dtype=dtype, device=device), weights, random_experts(rows, 2, 8, device=device)]


def to_experts_and_back(x, weights, experts):
    order = sort_by_expert(experts, 8)
    return unpermute(permute(x, order) * 2, order, weights)


def norm(f, residual, **options):
    parameters = 2 if f is layer_norm else 1
    if not residual:
        return Call(functools.partial(f, **options), of(SAME, *[LAST] * parameters), tuple(range(1 + parameters)))
    op = lambda x, r, *given: f(x, *given, residual=r, **options)  # noqa: E731
    return Call(op, of(SAME, SAME, *[LAST] * parameters), tuple(range(2 + parameters)))


def gated(f, **options):
    return Call(lambda gate, up, w: f(gate, up, weights=w, **options), of(SAME, SAME, ROWS), (0, 1))


def dropout(p):
    return functools.partial(bias_dropout_add, dropout_p=p, dropout_seed=2**40, index_offset=5)


CALLS = {
    "bias_gelu": Call(bias_gelu, of(SAME, LAST), (0, 1)),
    "bias_swiglu": Call(bias_swiglu, of(TWICE, LAST_TWICE), (0, 1)),
    "silu_mul": gated(silu_mul),
    "gelu_mul": gated(gelu_mul),
    **{f.__name__: norm(f, False) for f in (layer_norm, rms_norm)},
    **{f"{f.__name__} with a residual": norm(f, True) for f in (layer_norm, rms_norm)},
    "bias_dropout_add": Call(dropout(0.3), of(SAME, LAST, SAME), (0, 1, 2)),
    "bias_dropout_add, p = 0": Call(dropout(0.0), of(SAME, LAST, SAME), (0, 1, 2)),
    "scaled_causal_softmax": Call(functools.partial(scaled_causal_softmax, scale=0.7), of(SAME)),
    "scaled_causal_softmax in a window": Call(functools.partial(scaled_causal_softmax, window=3), of(SAME)),
    "scaled_masked_softmax": Call(functools.partial(scaled_masked_softmax, scale=0.7), with_mask("bool")),
    "scaled_masked_softmax, additive": Call(scaled_masked_softmax, with_mask("additive")),
    "scaled_masked_softmax in a window": Call(functools.partial(scaled_masked_softmax, window=(1, 2)), with_mask(None)),
    "rotary_embedding": Call(rotary_embedding, heads),
    "rotary_embedding of positions": Call(
        lambda x, cos, sin, p: rotary_embedding(x, cos, sin, positions=p), functools.partial(heads, positions=True)
    ),
    "permute and unpermute": Call(to_experts_and_back, tokens, (0, 1)),
}
# Compiled as those above are.
VARIANTS = {
    "bias_gelu without a bias": Call(bias_gelu, of(SAME)),
    "bias_gelu, exact": Call(functools.partial(bias_gelu, approximate="none"), of(SAME, LAST)),
    "bias_gelu without a bias, exact": Call(functools.partial(bias_gelu, approximate="none"), of(SAME)),
    "bias_swiglu without a bias": Call(bias_swiglu, of(TWICE)),
    "bias_swiglu, gate and up in turn": Call(functools.partial(bias_swiglu, interleaved=True, limit=1.0), of(TWICE)),
    "silu_mul of gpt-oss": gated(silu_mul, **GPT_OSS),
    "gelu_mul, exact": gated(gelu_mul, approximate="none"),
    "silu_mul without weights": Call(silu_mul, of(SAME, SAME), (0, 1)),
    "silu_mul of gpt-oss without weights": Call(functools.partial(silu_mul, **GPT_OSS), of(SAME, SAME), (0, 1)),
    "gelu_mul without weights": Call(gelu_mul, of(SAME, SAME), (0, 1)),
    "gelu_mul without weights, exact": Call(functools.partial(gelu_mul, approximate="none"), of(SAME, SAME), (0, 1)),
    **{f"{f.__name__}, zero-centred": norm(f, False, zero_centered=True) for f in (layer_norm, rms_norm)},
    **{
        f"{f.__name__} with a residual, zero-centred": norm(f, True, zero_centered=True) for f in (layer_norm, rms_norm)
    },
    "bias_dropout_add, p = 1": Call(dropout(1.0), of(SAME, LAST, SAME), (0, 1, 2)),
    **{
        f"bias_dropout_add without a bias, p = {p}": Call(dropout(p), of(SAME, None, SAME), (0, 2))
        for p in (0.3, 0.0, 1.0)
    },
    **{
        f"scaled_causal_softmax, {n} keys": Call(functools.partial(scaled_causal_softmax, window=n), of(SAME))
        for n in (1, 1000)
    },
    "scaled_masked_softmax without a mask": Call(scaled_masked_softmax, with_mask(None)),
    "rotary_embedding, interleaved": Call(functools.partial(rotary_embedding, interleaved=True), heads),
}
EVERY = CALLS | VARIANTS
every_call = pytest.mark.parametrize("name", EVERY)


@every_call
def test_gradient_matches_finite_differences(device, name):
    op, inputs, _ = EVERY[name]
    suite.check_gradient(op, inputs((3, 2, 6), dtype=torch.float64, device=device))


@every_call
def test_second_derivatives_raise(device, name):
    op, inputs, _ = EVERY[name]
    suite.check_second_derivative_raises(op, inputs((3, 2, 6), dtype=torch.float32, device=device))


@every_call
def test_same_bits_on_every_run_and_thread_count(device, name):
    op, inputs, _ = EVERY[name]
    args = inputs((7, 100, 1100), dtype=torch.float32, device=device)
    grads = [
        randn(*y.shape, dtype=y.dtype, device=device, seed=9 + i).detach()
        for i, y in enumerate(suite.outputs_of(op(*args)))
    ]
    suite.check_deterministic(op, args, grads)


@every_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts(device, dtype, name):
    op, inputs, layouts = EVERY[name]
    for index in layouts:
        suite.check_layouts(op, inputs((4, 3, 1030), dtype=dtype, device=device), index)


@pytest.mark.parametrize("name", CALLS)
def test_compiles_to_one_graph_for_all_sizes(device, name):
    op, inputs, _ = CALLS[name]
    suite.check_compiles(op, [inputs(s, dtype=torch.float32, device=device) for s in ((4, 3, 8), (6, 3, 10))])


@pytest.mark.parametrize("name", ["bias_gelu", "layer_norm with a residual"])
def test_inductor_compiles(device, name):
    """An op with one output, which stands for the others, and one with several."""
    op, inputs, _ = CALLS[name]
    cases = [inputs(s, dtype=torch.float32, device=device) for s in ((4, 3, 8), (6, 3, 10))]
    suite.check_compiles(op, cases, backend="inductor")


@every_call
def test_activation_checkpointing(device, name):
    op, inputs, _ = EVERY[name]
    suite.check_checkpointing(op, inputs((6, 8), dtype=torch.float32, device=device))
