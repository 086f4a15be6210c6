"""Linears of experts with float8 matmuls: the formats' error, each expert as a linear alone, torch's kernel."""

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F

from parallel_ops import DeferredWeightGradients, float8_grouped_linear, float8_linear, grouped_linear
from parallel_ops._internal.gradients.weight_gradients import ParameterGrad
from parallel_ops.ops import sort_by_expert
from parallel_ops.ops.float8_recipes import E4M3, RECIPES, Quantized, quantize, quantize_groups, swizzled
from support.numerics.suite import refuses

module = sys.modules["parallel_ops.ops.float8_grouped_linear"]  # of the name of its function
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
N, IN, OUT = 4, 256, 128


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def inputs(recipe, bias=False):
    """Rows of four experts, the first and the third without any, each with padding, and padding behind the last."""
    chosen = torch.tensor([1] * 150 + [3] * 37 + [1] * 20)[:, None]
    order = sort_by_expert(chosen, N, multiple=RECIPES[recipe].rows)
    x = torch.where(order.rows[:, None] >= 0, drawn(len(order.rows), IN, seed=0), 0)
    x[order.offs[-1] :] = torch.nan
    weight, biases = drawn(N, OUT, IN, seed=1), drawn(N, OUT, seed=2) if bias else None
    dy = torch.where(order.rows[:, None] >= 0, drawn(len(x), OUT, seed=3), 0)
    dy[order.offs[-1] :] = torch.nan
    given = [t if t is None else t.requires_grad_() for t in (x, weight, biases)]
    return given, order.offs, dy


def results(op, given, offs, dy, **options):
    x, weight, bias = given
    y = op(x, weight, offs, bias=bias, **options)
    wanted = [t for t in given if t is not None]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


@every_recipe
@pytest.mark.parametrize("bias", [False, True])
def test_products_against_fp64(recipe, bias):
    given, offs, dy = inputs(recipe, bias)
    found = results(float8_grouped_linear, given, offs, dy, recipe=recipe, emulated=True)
    end = int(offs[-1])
    assert len(dy) > end or recipe == "fp8_rowwise"
    exact = [t if t is None else t.detach().double().requires_grad_() for t in given]
    wanted = results(grouped_linear, exact, offs, dy.double())
    sizes = [t if t is None else t.detach().double().abs().requires_grad_() for t in given]
    sizes[2] = None
    bounds = results(grouped_linear, sizes, offs, dy.double().abs())
    assert all(not t[end:].any() for t in found[:2]) and all(t.isfinite().all() for t in found)
    for got, true, bound in zip(found[:3], wanted[:3], bounds, strict=True):
        assert got.dtype is torch.bfloat16
        error = (got.double() - true).abs()
        assert (error <= 1.02 * (2 * 2.0**-4 + 2.0**-8) * bound + 2.0**-7 * true.abs() + 1e-2).all()
        assert 1e-3 < error.norm() / true.norm() < 0.05
    assert not found[2][[0, 2]].any()
    if bias:
        torch.testing.assert_close(found[3].double(), wanted[3], rtol=2.0**-7, atol=0)


@every_recipe
def test_each_expert_is_a_linear_alone(recipe):
    """To the bit; gradients by row are e4m3 here and e5m2 there."""
    given, offs, dy = inputs(recipe)
    y, dx, dweight = results(float8_grouped_linear, given, offs, dy, recipe=recipe, emulated=True)
    for expert, start, end in ((1, 0, int(offs[1])), (3, int(offs[2]), int(offs[3]))):
        x, weight = given[0].detach()[start:end].requires_grad_(), given[1].detach()[expert].requires_grad_()
        alone = float8_linear(x, [weight], [None], recipe=recipe, emulated=True)[0]
        assert torch.equal(y[start:end], alone)
        if recipe != "fp8_rowwise":
            of_x, of_weight = torch.autograd.grad(alone, [x, weight], dy[start:end])
            assert torch.equal(dx[start:end], of_x) and torch.equal(dweight[expert], of_weight)


@every_recipe
def test_a_queue_and_halves_of_a_backward_compute_the_same(recipe):
    given, offs, dy = inputs(recipe)
    options = {"recipe": recipe, "emulated": True}
    _, dx, dweight = results(float8_grouped_linear, given, offs, dy, **options)
    y = float8_grouped_linear(given[0], given[1], offs, **options)
    halves = [torch.autograd.grad(y, t, dy, retain_graph=True)[0] for t in given[:2]]
    assert torch.equal(halves[0], dx) and torch.equal(halves[1], dweight)
    queue, weight = DeferredWeightGradients(), torch.nn.Parameter(given[1].detach().clone())
    y = float8_grouped_linear(given[0], weight, offs, main_grad=ParameterGrad(weight), deferred=queue, **options)
    (of_x,) = torch.autograd.grad(y, given[0], dy, retain_graph=True)
    assert torch.equal(of_x, dx) and not len(queue)
    y.backward(dy)
    assert weight.grad is None and len(queue) == 1
    weight.data.fill_(torch.nan)  # as FSDP2 frees it: the weight half reads x and dy
    queue.compute()
    assert torch.equal(weight.grad, dweight)


@every_recipe
def test_each_form_is_quantized_once(recipe, monkeypatch):
    given, offs, dy = inputs(recipe)
    quantized = []

    def counting(t, dtype, form, **options):
        quantized.append(tuple(t.shape))
        return quantize(t, dtype, form, **options)

    monkeypatch.setattr(module, "quantize", counting)
    monkeypatch.setattr(module, "quantize_groups", lambda t, *rest: quantized.append(("by column", *t.shape)) or
                        quantize_groups(t, *rest))  # fmt: skip
    results(float8_grouped_linear, given, offs, dy, recipe=recipe, emulated=True)
    rows = len(dy)
    turned = (N * OUT, IN) if RECIPES[recipe].square else (N * IN, OUT)
    assert quantized == [(rows, IN), (N * OUT, IN), (rows, OUT), turned, ("by column", rows, OUT),
                         ("by column", rows, IN)]  # fmt: skip


def blocked(rows, blocks):
    """Which of the scales of a matrix each place of cuBLAS's layout has; -1 for padding."""
    order = torch.arange(rows * blocks).view(rows, blocks) + 1
    low, high = (swizzled((order // 256**n % 256).to(torch.uint8)).long() for n in (0, 1))
    return low + 256 * high - 1


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "mxfp8"])
def test_calls_of_scaled_grouped_mm(recipe, monkeypatch):
    """A stand-in that reads scales where torch's kernels do: group after group, each as a matrix alone."""
    form, calls = RECIPES[recipe], []

    def wide(values, flat, blocks):
        """A matrix of a group, whose scales begin at ``flat``; and how many there are."""
        if recipe == "fp8_rowwise":
            return values.float() * flat[: len(values), None], len(values)
        places = blocked(len(values), blocks)
        scales = torch.zeros(len(values) * blocks)
        scales[places[places >= 0]] = flat[: len(places)].float()[places >= 0]
        return values.float() * scales.view(len(values), blocks).repeat_interleave(32, 1), len(places)

    def stand_in(a, b, *, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b, offs, output_dtype,
                 use_fast_accum):  # fmt: skip
        mx = recipe == "mxfp8"
        assert scale_recipe_a is scale_recipe_b and swizzle_a is swizzle_b and offs.dtype is torch.int32
        assert scale_recipe_a is (F.ScalingType.BlockWise1x32 if mx else F.ScalingType.RowWise)
        assert swizzle_a is (F.SwizzleType.SWIZZLE_32_4_4 if mx else F.SwizzleType.NO_SWIZZLE)
        assert {s.dtype for s in (scale_a, scale_b)} == {torch.float8_e8m0fnu if mx else torch.float32}
        assert a.is_contiguous() and b.mT.is_contiguous() and a.dtype is b.dtype is E4M3
        calls.append(use_fast_accum)
        other, bounds = b.mT, [0, *offs.tolist()]  # [n, N, K] or [K, r]
        summed, read_a, read_b = b.dim() == 2, 0, 0
        if summed:  # the checks of GroupedBlas.cpp
            assert scale_a.dim() == (2 if mx else 1) and (mx or len(scale_a) == len(a) * len(offs))
            assert not mx or scale_a.shape[0] >= len(a)
            found = torch.full((len(offs), len(a), len(other)), torch.nan)
        else:
            assert scale_a.dim() == (2 if mx else 1) and len(scale_a) >= len(a) and scale_b.dim() == 2
            expected = -(-other.shape[2] // 128) * 4 * -(-other.shape[1] // 128) * 128 if mx else other.shape[1]
            assert tuple(scale_b.shape) == (len(other), expected)
            found = torch.full((len(a), other.shape[1]), torch.nan)
        flat_a, flat_b = scale_a.flatten(), scale_b.flatten()
        for g, (start, end) in enumerate(itertools.pairwise(bounds)):
            if start == end:  # by row a group without rows has scales too
                read_a, read_b = (read_a + len(a), read_b + len(other)) if summed and not mx else (read_a, read_b)
            elif summed:
                blocks = (end - start) // 32
                left, used_a = wide(a[:, start:end], flat_a[read_a:], blocks)
                right, used_b = wide(other[:, start:end], flat_b[read_b:], blocks)
                found[g], read_a, read_b = left @ right.t(), read_a + used_a, read_b + used_b
            else:
                left, used_a = wide(a[start:end], flat_a[read_a:], a.shape[1] // 32)
                right, _ = wide(other[g], scale_b[g], a.shape[1] // 32)
                found[start:end], read_a = left @ right.t(), read_a + used_a
        return found.to(output_dtype)

    monkeypatch.setattr(F, "scaled_grouped_mm", stand_in)
    given, offs, dy = inputs(recipe)
    x, weight = given[0].detach(), given[1].detach()
    for a, b, gradient in (
        (quantize(x, E4M3, form), module._experts(weight, form), False),
        (quantize(dy, E4M3, form), module._experts(weight, form, transposed=True), True),
        (quantize_groups(dy, offs, form), quantize_groups(x, offs, form), True),
    ):
        got = module._kernel(Quantized(*a[:2]), Quantized(*b[:2]), offs, form, gradient)
        wanted = module._multiply(a, b, offs, form, emulated=True)
        part = [1, 3] if wanted.dim() == 3 else slice(0, int(offs[-1]))
        assert torch.equal(got[part], wanted[part])
    assert calls == [True, False, False]


@pytest.mark.parametrize("built", [True, False])
def test_a_kernel_is_used_where_torch_was_built_with_it(built, monkeypatch):
    def stand_in(a, b, **_):
        if built:
            return a.new_zeros(len(a), b.shape[2], dtype=torch.bfloat16)
        raise NotImplementedError("mxfp8_mxfp8 grouped gemm requires compile with USE_FBGEMM_GENAI")

    monkeypatch.setattr(F, "scaled_grouped_mm", stand_in)
    for major, has in ((8, ()), (9, ("fp8_rowwise",)), (10, ("mxfp8",)), (12, ())):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, major=major: (major, 0))
        found = [name for name in RECIPES if module.one_kernel_for.__wrapped__(torch.device("cpu"), name)]
        assert found == (list(has) if built else [])


@every_recipe
def test_compiles_to_one_graph(recipe):
    given, offs, dy = inputs(recipe, bias=True)

    def call(x, weight, offs, *, bias):
        return float8_grouped_linear(x, weight, offs, bias=bias, recipe=recipe, emulated=True)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for a, b in zip(results(call, given, offs, dy), results(compiled, given, offs, dy), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_no_rows():
    x, weight = drawn(0, 32, seed=0).requires_grad_(), drawn(2, 16, 32, seed=1).requires_grad_()
    y = float8_grouped_linear(x, weight, torch.zeros(2, dtype=torch.int32), emulated=True)
    y.backward(y.detach())
    assert y.shape == (0, 16) and x.grad.shape == (0, 32) and not weight.grad.any()


def test_refusals():
    x, weight, offs = drawn(32, 32, seed=0), drawn(2, 16, 32, seed=1), torch.tensor([16, 32])
    for arguments, options, error, message in (
        ((x, weight, offs), {"emulated": False}, ValueError, "x is on cpu, .* emulated=True"),
        ((x, weight, offs), {"recipe": "fp8"}, ValueError, "recipe must be one of 'fp8_rowwise', .* got 'fp8'"),
        ((x.float(), weight, offs), {}, TypeError, "x must be bfloat16, got torch.float32"),
        ((x, weight[..., :16], offs), {}, ValueError, r"got \[32, 32\] and \[2, 16, 16\]"),
        ((x, weight, offs), {"recipe": "mxfp8"}, ValueError, r"sizes \[2, 16, 32\], the last of which 32 must divide"),
        ((x[:30], weight, offs), {}, ValueError, "x has 30 rows, which 16 must divide"),
        ((x, weight, torch.tensor([15, 32])), {}, ValueError, "offs must be multiples of 16, got 15"),
        ((x, weight, torch.tensor([16, 48])), {}, ValueError, r"offs\[1\] is 48"),
        ((x, weight, offs[:1]), {}, ValueError, r"offs must have shape \[2\]"),
        ((x, weight, offs.float()), {}, TypeError, "offs must be a tensor of int32 or int64"),
        ((x, weight, offs), {"bias": x[:2]}, ValueError, r"bias must have shape \[2, 16\]"),
    ):
        refuses(float8_grouped_linear, error, message, *arguments, **{"emulated": True} | options)
