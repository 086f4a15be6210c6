"""Linears with float8 matmuls: quantization by row, matmuls within the formats' error, gradients, refusals."""

import functools

import pytest
import torch
import torch.nn.functional as F

from parallel_ops._internal.gradients.weight_gradients import ParameterGrad
from parallel_ops.layers import ColumnParallelLinear, RowParallelLinear
from parallel_ops.ops.float8_linear import float8_linear
from parallel_ops.ops.float8_recipes import E4M3, RECIPES, device_problem
from parallel_ops.tensor_parallel import DeferredWeightGradients
from support.numerics.suite import FLOAT8_ROUNDING as ROUNDING
from support.numerics.suite import refused, refuses
from support.numerics.suite import rows_far_apart as drawn


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [(5,), (128,), (3, 7)])
def test_products_against_fp64(rows, recipe):
    """Each within the sum of the errors of its factors."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(*rows, n, generator=generator).bfloat16() for n in (256, 128))
    weight, bias = (torch.randn(*n, generator=generator).bfloat16() for n in ((128, 256), (128,)))
    given = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = float8_linear(given[0], [given[1]], [given[2]], recipe=recipe, emulated=True)[0]
    y.backward(dy)
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = F.linear(*exact)
    expected.backward(dy.double())
    flat, out = x.double().flatten(0, -2).abs(), dy.double().flatten(0, -2).abs()
    wide, gradient = weight.double().abs(), RECIPES[recipe].gradient
    for got, wanted, bound, formats in (
        (y, expected, flat @ wide.t(), (E4M3, E4M3)),
        (given[0].grad, exact[0].grad, out @ wide, (gradient, E4M3)),
        (given[1].grad, exact[1].grad, out.t() @ flat, (gradient, E4M3)),
    ):
        assert got.dtype is torch.bfloat16 and got.shape == wanted.shape
        error = (got.double() - wanted).flatten(0, -2).abs()
        worst = sum(ROUNDING[f] for f in formats) + ROUNDING[formats[0]] * ROUNDING[formats[1]]
        assert (error <= 1.02 * worst * bound + 2.0**-7 * wanted.abs().flatten(0, -2) + 1e-2).all()
        # Errors are independent, so that their sum is far smaller than the worst; and there are some.
        assert 1e-3 < error.norm() / wanted.norm() < worst / 2
    torch.testing.assert_close(given[2].grad.double(), exact[2].grad, rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(recipe, bad):
    x, weight = drawn(8, 256), drawn(128, 256, seed=1)
    x[3, 5], others = bad, torch.arange(8) != 3
    y, alone = (float8_linear(t, [weight], [None], recipe=recipe, emulated=True)[0] for t in (x, x[others]))
    assert not y[3].isfinite().any() and torch.equal(y[others], alone)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_queue_computes_the_same_weight_gradients(recipe):
    x, dy = drawn(40, 128), drawn(40, 128, seed=3)
    weights = [torch.nn.Parameter(drawn(128, 128, seed=n)) for n in (1, 2)]
    x.requires_grad_()
    options = {"recipe": recipe, "emulated": True}
    wanted = torch.autograd.grad(
        sum((y * dy).sum() for y in float8_linear(x, weights, [None, None], **options)), [x, *weights]
    )
    queue = DeferredWeightGradients()
    weights[1].requires_grad_(False)
    targets = [ParameterGrad(weights[0]), None]
    ys = float8_linear(x, weights, [None, None], deferred=queue, targets=targets, **options)
    sum((y * dy).sum() for y in ys).backward()
    assert torch.equal(x.grad, wanted[0]) and weights[0].grad is None and len(queue) == 1
    queue.compute()
    assert torch.equal(weights[0].grad, wanted[1]) and weights[1].grad is None


def test_several_weights_are_as_each_alone():
    x, dy = drawn(16, 32).requires_grad_(), drawn(16, 16, seed=3)
    weights = [drawn(n, 32, seed=n).requires_grad_() for n in (16, 16)]
    both = float8_linear(x, weights, [None, None], emulated=True)
    alone = [float8_linear(x, [w], [None], emulated=True)[0] for w in weights]
    assert all(torch.equal(a, b) for a, b in zip(both, alone, strict=True))
    wanted = torch.autograd.grad(sum((y * dy).sum() for y in alone), [x, *weights])
    found = torch.autograd.grad(sum((y * dy).sum() for y in both), [x, *weights])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_halves_of_a_backward_are_the_whole():
    x, weight = drawn(16, 32).requires_grad_(), drawn(48, 32, seed=1).requires_grad_()
    y = float8_linear(x, [weight], [None], emulated=True)[0].sum()
    whole = torch.autograd.grad(y, [x, weight], retain_graph=True)
    halves = [torch.autograd.grad(y, [t], retain_graph=True)[0] for t in (x, weight)]
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))
    refused(RuntimeError, "second derivatives", torch.autograd.grad, y, [x], create_graph=True)


def test_compiles_to_one_graph():
    x, weight = drawn(16, 32).requires_grad_(), drawn(48, 32, seed=1).requires_grad_()

    def call(x, weight):
        return float8_linear(x, [weight], [None], emulated=True)[0]

    y, compiled = call(x, weight), torch.compile(call, backend="aot_eager", fullgraph=True)(x, weight)
    assert torch.equal(y, compiled)
    found = [torch.autograd.grad(each.sum(), [x, weight]) for each in (y, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_layers_under_autocast():
    torch.manual_seed(0)
    up, down = ColumnParallelLinear(32, 48, tp_mesh=None), RowParallelLinear(48, 32, tp_mesh=None)
    x = torch.randn(6, 2, 32, requires_grad=True)
    up.precision = down.precision = "fp8_rowwise"
    up.emulated = down.emulated = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = down(up(x))
    assert y.dtype is torch.bfloat16
    y.float().square().sum().backward()
    gradients = [t.grad for t in (x, up.weight, up.bias, down.weight, down.bias)]
    assert all(g is not None and g.dtype is torch.float32 and g.any() for g in gradients)


def test_refusals():
    x, weight = drawn(16, 32), drawn(48, 32)
    wrong = functools.partial(refuses, float8_linear)
    wrong(ValueError, "x is on cpu, .* emulated=True", x, [weight], [None])
    wrong(TypeError, r"x must be bfloat16, got torch\.float32", x.float(), [weight], [None], emulated=True)
    wrong(ValueError, r"weight must be \[N, 32\].*got \[48, 16\]", x, [weight[:, :16]], [None], emulated=True)
    wrong(ValueError, r"weight has the sizes \[47, 32\], which 16 must divide", x, [weight[:47]], [None], emulated=True)
    wrong(ValueError, r"bias must be \[48\], got \[32\]", x, [weight], [x[0]], emulated=True)
    wrong(ValueError, "one entry for each weight, got 0 for 1", x, [weight], [], emulated=True)
    with pytest.raises(ValueError, match=r"weight has the sizes \[48, 32\], which 128 must divide"):
        float8_linear(x, [weight], [None], recipe="fp8_blockwise", emulated=True)
    with pytest.raises(ValueError, match="recipe must be one of 'fp8_rowwise', 'fp8_blockwise', 'mxfp8', got 'fp8'"):
        float8_linear(x, [weight], [None], recipe="fp8", emulated=True)
    assert "mxfp8 products need a GPU" in (device_problem(torch.device("cpu"), "mxfp8") or "")


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_layers_refuse_main_grad(kind):
    layer = kind(32, 32, tp_mesh=None, dtype=torch.bfloat16)
    layer.precision, layer.emulated = "mxfp8", True
    layer.main_grad = torch.zeros(32, 32)
    refused(ValueError, f"{kind.__name__}: main_grad cannot be used with mxfp8", layer, drawn(4, 32))
