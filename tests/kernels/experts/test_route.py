import numpy as np
import pytest
import torch

from parallel_ops import route
from parallel_ops.ops import route_reference
from ptx import aot
from ptx.kernels import check_machine_code, meta
from ptx.machine import Approximation
from support.numerics import suite
from support.numerics.experts import spread_logits
from support.numerics.suite import randn

DEEPSEEK = {"sigmoid": True, "groups": 8, "top_groups": 4, "top_k_first": False, "normalize": True}
SOFTMAX = {"sigmoid": False, "groups": 1, "top_groups": 1, "top_k_first": False, "normalize": True}
GPT_OSS = {**SOFTMAX, "top_k_first": True}


def launches(dtype, rows, n, k, options):
    from parallel_ops.triton_kernels.experts import route as kernels

    acc = torch.float64 if dtype is torch.float64 else torch.float32
    logits, bias, weights = meta(rows, n, dtype=dtype), meta(n, dtype=acc), meta(rows, k, dtype=acc)
    experts, load, z = meta(rows, k, dtype=torch.int64), meta(n, dtype=torch.int32), meta(dtype=acc)
    of_backward = {key: value for key, value in options.items() if "groups" not in key}
    with aot.recorded() as recorded:
        kernels.forward(logits, bias, weights, bias, z, experts, load, scale=2.5, **options)
        kernels.backward(logits, experts, weights, bias, z, logits, scale=2.5, **of_backward)
    return recorded


@pytest.mark.aot
@pytest.mark.parametrize(
    ("dtype", "rows", "n", "k", "options", "capability"),
    [
        (torch.bfloat16, 8192, 256, 8, DEEPSEEK, 80),
        (torch.bfloat16, 8192, 256, 8, DEEPSEEK, 90),
        (torch.bfloat16, 8192, 256, 8, DEEPSEEK, 100),
        (torch.float32, 8192, 256, 8, DEEPSEEK, 90),
        (torch.bfloat16, 32768, 64, 6, SOFTMAX, 90),
        (torch.bfloat16, 100, 160, 6, {**DEEPSEEK, "top_groups": 3}, 90),
        (torch.bfloat16, 8192, 1024, 16, GPT_OSS, 90),
        (torch.float32, 8192, 4096, 4, SOFTMAX, 90),
        (torch.bfloat16, 8192, 128, 24, SOFTMAX, 90),
    ],
    ids=str,
)
def test_compiled_code(dtype, rows, n, k, options, capability):
    for launch in launches(dtype, rows, n, k, options):
        check_machine_code(launch, capability)


CASES = [
    (50, 40, 4, torch.bfloat16, {"score": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5}, True),
    *((50, 40, 4, dtype, {"score": score, "top_k_first": first}, biased)
      for dtype, score, first, biased in [
          (torch.float32, "softmax", False, True), (torch.float16, "softmax", True, False),
          (torch.float64, "sigmoid", True, False), (torch.float64, "softmax", False, True)]),
    (33, 60, 7, torch.float32, {"groups": 5, "top_groups": 3, "normalize": False}, True),
    (20, 8, 2, torch.float32, {"groups": 8, "top_groups": 3}, False),
    (20, 12, 1, torch.float32, {"score": "sigmoid", "groups": 4, "top_groups": 1}, False),
    (9, 1024, 12, torch.float32, {}, False),
    (700, 16, 2, torch.float32, {"score": "sigmoid", "groups": 4, "top_groups": 2}, True),
    (1, 3, 1, torch.float32, {}, False),
    (0, 5, 2, torch.float32, {}, False),
]  # fmt: skip


@pytest.mark.executed
@pytest.mark.parametrize(("t", "n", "k", "dtype", "options", "biased"), CASES, ids=str)
def test_interpreted(t, n, k, dtype, options, biased):
    x = spread_logits(t, n, dtype=dtype)
    bias = 8.0 * torch.randperm(n, generator=torch.Generator().manual_seed(1)) if biased else None
    acc = torch.float64 if dtype is torch.float64 else torch.float32
    flat = randn(t * k + n + 1, dtype=acc).detach()

    def differentiable(f):
        def run(logits):
            r = f(logits, k, bias=bias, **options)
            return r.weights, r.score_sums, r.z_sum

        return run

    ours = route(x.detach(), k, bias=bias, **options)
    slack = 64 if dtype is torch.float64 else 8  # approximate instructions are off by their worst error
    grads = [flat[: t * k].view(t, k), flat[t * k : -1], flat[-1]]
    suite.check_numerics(differentiable(route), differentiable(route_reference), [x], grads, slack_ulps=slack)
    theirs = route_reference(x.detach().double(), k, bias=bias, **options)
    assert torch.equal(ours.experts, theirs.experts)
    assert torch.equal(ours.load, theirs.load)


@pytest.mark.executed
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_score_sums_where_divisions_are_off_by_their_worst(score, monkeypatch):
    """All in one direction, as the same divisor gives in every row: within twice the error of PyTorch's."""
    monkeypatch.setattr(Approximation, "off", lambda self, x, **error: _upwards(x, **error))
    x = randn(64, 16, dtype=torch.float32).detach().sort(dim=1).values
    ours = route(x, 2, score=score).score_sums
    exact = route_reference(x.double(), 2, score=score).score_sums
    theirs = route_reference(x, 2, score=score).score_sums
    error, allowed = ((t.double() - exact).abs().max().item() for t in (ours, theirs))
    assert error <= 2 * allowed, (error, allowed)


def _upwards(x, *, relative=0.0, ulps=0.0, absolute=0.0):
    ulp = np.spacing(np.abs(x.astype(np.float32))).astype(np.float64)
    return (x + relative * np.abs(x) + ulps * ulp + absolute).astype(np.float32)


@pytest.mark.executed
def test_ties_nan_and_infinity():
    rows = torch.arange(16.0).repeat(6, 1)
    rows[1, 3] = torch.nan
    rows[2, 4:] = -torch.inf
    rows[3] = -torch.inf
    rows[4, 5] = torch.inf
    rows[5] = 0.0
    for options in ({}, {"score": "sigmoid", "groups": 4, "top_groups": 2}):
        for x in rows[1:, None]:  # one by one: NaNs of several origins have other bits in other threads here
            ours = route(x, 6, **options)
            theirs = route_reference(x, 6, **options)
            torch.testing.assert_close(tuple(ours), tuple(theirs), equal_nan=True, rtol=1e-5, atol=0)


@pytest.mark.executed
@pytest.mark.parametrize(
    ("n", "k", "options"),
    [
        (256, 8, {"score": "sigmoid", "groups": 8, "top_groups": 4}),
        (64, 6, {}),
        (40, 19, {"top_k_first": True}),  # more than are unrolled
        (60, 9, {"groups": 12, "top_groups": 5}),
        (130, 4, {"normalize": False}),
        (33, 32, {"score": "sigmoid"}),
        (6, 2, {"groups": 3, "top_groups": 2}),
        (8, 3, {"groups": 8, "top_groups": 3}),
    ],
    ids=str,
)
def test_equal_logits_go_by_index(n, k, options):
    """Of few different values: most choices are among equals."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randint(-2, 3, (21, n), generator=generator).float()
    x[0], x[1, ::2] = 1.0, torch.nan
    bias = 8.0 * torch.randint(-1, 2, (n,), generator=generator) if n % 4 else None
    ours = route(x, k, bias=bias, **options)
    theirs = route_reference(x, k, bias=bias, **options)
    assert torch.equal(ours.experts, theirs.experts)
    assert torch.equal(ours.load, theirs.load)
    torch.testing.assert_close(ours.weights, theirs.weights, equal_nan=True, rtol=1e-5, atol=1e-7)


@pytest.mark.executed(smoke=False)
def test_strides():
    x = spread_logits(30, 40, dtype=torch.float32)
    grad = randn(30, 5, dtype=torch.float32).detach()
    expected = suite.forward_backward(lambda x: route(x, 5).weights, [x], grad)
    for layout in suite.layouts(x).values():
        for g in suite.layouts(grad).values():
            got = suite.forward_backward(lambda x: route(x, 5).weights, [layout], g)
            # Rows that begin at no multiple of 16 bytes are held by other threads, and summed in another order.
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
