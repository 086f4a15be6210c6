"""Linears with float8 matmuls: quantization by row, matmuls within the formats' error, gradients, refusals."""

import pytest
import torch
import torch.nn.functional as F

from parallel_ops._internal.gradients.weight_gradients import ParameterGrad
from parallel_ops.layers import ColumnParallelLinear, RowParallelLinear
from parallel_ops.ops.float8_linear import float8_linear
from parallel_ops.ops.float8_recipes import RECIPES, device_problem, product, quantize, swizzled
from parallel_ops.tensor_parallel import DeferredWeightGradients
from support.numerics.suite import refused

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Half a unit in the last place, relative: 3 and 2 bits of mantissa.
ROUNDING = {E4M3: 2.0**-4, E5M2: 2.0**-3}
# Half the smallest subnormal, relative to the largest value.
UNDERFLOW = {E4M3: 2.0**-10 / 448, E5M2: 2.0**-17 / 57344}


ROWS = RECIPES["fp8_rowwise"]


def quantize_rows(t, dtype):
    values, scales, _ = quantize(t, dtype, ROWS)
    return values, scales


def drawn(*shape, seed=0):
    """Rows of sizes that lie far apart, with the outliers that activations have."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[0])[:, None]
    t[:, 0] *= 20
    return t.bfloat16()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_are_the_largest_of_each_row(dtype):
    t = drawn(24, 40)
    values, scales = quantize_rows(t, dtype)
    assert values.dtype is dtype and values.is_contiguous() and scales.dtype is torch.float32
    most = t.double().abs().amax(1, keepdim=True)
    torch.testing.assert_close(scales.double(), most / torch.finfo(dtype).max, rtol=2.0**-23, atol=0)
    assert (values.double().abs().amax(1) == torch.finfo(dtype).max).all()
    error = (values.double() * scales.double() - t.double()).abs()
    assert (error <= 1.001 * (ROUNDING[dtype] * t.double().abs() + UNDERFLOW[dtype] * most)).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_transposed_matrices_are_quantized_by_column(dtype):
    t = drawn(16, 32)
    values, scales = quantize_rows(t.t(), dtype)
    again, same = quantize_rows(t.t().contiguous(), dtype)
    assert values.is_contiguous() and torch.equal(values.float(), again.float()) and torch.equal(scales, same)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rows_of_zeros_and_of_the_least_values(dtype):
    t = torch.zeros(4, 16)
    t[1] = 1e-45
    t[2] = torch.finfo(torch.bfloat16).max
    values, scales = quantize_rows(t, dtype)
    dequantized = values.double() * scales.double()
    assert scales.isfinite().all() and (dequantized[[0, 3]] == 0).all() and dequantized[1].abs().max() <= 2e-45
    torch.testing.assert_close(dequantized[2], t[2].double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_propagates(bad):
    x, weight = drawn(16, 32), drawn(48, 32, seed=1)
    x[3, 5] = bad
    y = float8_linear(x, [weight], [None], emulated=True)[0]
    assert not y[3].isfinite().any()
    others = torch.arange(16) != 3
    assert torch.equal(y[others], float8_linear(x[others], [weight], [None], emulated=True)[0])


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


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "mxfp8"])
def test_scales_of_blocks(recipe):
    form = RECIPES[recipe]
    t = drawn(256, 384) * torch.logspace(-2, 2, 384).bfloat16()
    t[3, :128], t[200:, 256:] = 0, 0
    for weight in (False, True):
        found = quantize(t, E4M3, form, weight=weight)
        rows = form.block if weight and form.square else 1
        blocks = t.double().view(256 // rows, rows, 384 // form.block, form.block)
        most = blocks.abs().amax((1, 3))
        assert found.scales.shape == most.shape and found.values.is_contiguous()
        scales = (most / 448).clamp(min=torch.finfo(torch.float32).tiny)
        if recipe == "mxfp8":
            assert torch.equal(found.scales.double(), 2 ** scales.float().double().log2().ceil())
            assert torch.equal(found.scales.to(torch.float8_e8m0fnu).float(), found.scales)
        else:
            torch.testing.assert_close(found.scales.double(), scales, rtol=2.0**-23, atol=0)
        error = (found.wide().double() - t.double()).view_as(blocks).abs()
        least = 2.0**-10 * found.scales.double()[:, None, :, None]
        assert (error <= 1.001 * (ROUNDING[E4M3] * blocks.abs() + least)).all()
        if found.square:
            again = quantize(t.t(), E4M3, form, weight=True)
            assert torch.equal(found.transposed().values.float(), again.values.float())
            assert torch.equal(found.transposed().scales, again.scales)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_parts_that_are_not_finite(recipe, bad):
    x, weight = drawn(8, 256), drawn(128, 256, seed=1)
    x[3, 5] = bad
    y = float8_linear(x, [weight], [None], recipe=recipe, emulated=True)[0]
    assert not y[3].isfinite().any() and y[torch.arange(8) != 3].isfinite().all()


def test_scales_in_tiles_are_where_cublas_reads_them():
    """cuBLAS, "1D block scaling factors layout"."""
    for rows, blocks in ((128, 4), (1, 1), (300, 9), (256, 8)):
        scales = torch.randint(1, 255, (rows, blocks), dtype=torch.uint8)
        wanted = torch.zeros(-(-rows // 128) * -(-blocks // 4) * 512, dtype=torch.uint8)
        for row in range(rows):
            for block in range(blocks):
                tile = row // 128 * -(-blocks // 4) + block // 4
                wanted[512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4] = scales[row, block]
        assert torch.equal(swizzled(scales.view(torch.float8_e8m0fnu)).view(torch.uint8), wanted)


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "mxfp8"])
def test_calls_of_scaled_mm(recipe, monkeypatch):
    """A stand-in that reads scales where cuBLAS does; see ``_pad_128x128_scales`` and ``to_blocked`` in its tests."""
    kinds, form = [], RECIPES[recipe]

    def scales_of(values, scales, kind, swizzle):
        kinds.append(kind)
        rows, columns = values.shape
        if kind is F.ScalingType.BlockWise1x32:
            assert swizzle is F.SwizzleType.SWIZZLE_32_4_4 and scales.dtype is torch.float8_e8m0fnu
            places = swizzled(torch.ones(rows, columns // 32, dtype=torch.uint8)).bool()
            found = torch.zeros(rows * (columns // 32), dtype=torch.float32)
            order = torch.arange(rows * (columns // 32)).view(rows, -1)
            low, high = (swizzled((order // 256**n % 256).to(torch.uint8)).long() for n in (0, 1))
            found[(low + 256 * high)[places]] = scales.float()[places]
            return found.view(rows, -1).repeat_interleave(32, 1)
        assert swizzle is F.SwizzleType.NO_SWIZZLE and scales.dtype is torch.float32 and scales.stride(0) == 1
        if kind is F.ScalingType.BlockWise1x128:
            assert scales.shape == (rows, columns // 128)
            return scales.repeat_interleave(128, 1)
        assert kind is F.ScalingType.BlockWise128x128
        assert scales.shape == (-(-(columns // 128) // 4) * 4, rows // 128)
        return scales[: columns // 128].t().repeat_interleave(128, 0).repeat_interleave(128, 1)

    def scaled_mm(a, b, *, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b, output_dtype):
        assert a.is_contiguous() and b.t().is_contiguous()
        wide = [
            v.float() * scales_of(v, *rest)
            for v, *rest in ((a, scale_a, scale_recipe_a, swizzle_a), (b.t(), scale_b, scale_recipe_b, swizzle_b))
        ]
        return (wide[0] @ wide[1].t()).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    a, b, weight = (
        quantize(drawn(rows, 640, seed=seed), E4M3, form, weight=seed == 2)
        for seed, rows in enumerate((160, 32, 256))
    )  # fmt: skip
    for other in (b, weight):
        assert torch.equal(product(a, other, form, emulated=False), product(a, other, form, emulated=True))
    if recipe == "fp8_blockwise":
        assert kinds == [F.ScalingType.BlockWise1x128] * 3 + [F.ScalingType.BlockWise128x128]


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


def test_gradients_are_summed_outside_of_the_tensor_cores(monkeypatch):
    """By their formats: e5m2 is that of an output's gradient."""
    calls = []

    def scaled(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
        calls.append((a.dtype, use_fast_accum))
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    x, weight = drawn(16, 32), drawn(16, 32, seed=3)
    product(*(quantize(t, E4M3, ROWS) for t in (x, weight)), ROWS, emulated=False)
    product(quantize(drawn(16, 32), E5M2, ROWS), quantize(weight, E4M3, ROWS), ROWS, emulated=False, gradient=True)
    assert calls == [(E4M3, True), (E5M2, False)]


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
    refused(ValueError, r"x is on cpu, .* emulated=True", float8_linear, x, [weight], [None])
    with pytest.raises(TypeError, match=r"x must be bfloat16, got torch\.float32"):
        float8_linear(x.float(), [weight], [None], emulated=True)
    with pytest.raises(ValueError, match=r"weight must be \[N, 32\].*got \[48, 16\]"):
        float8_linear(x, [weight[:, :16]], [None], emulated=True)
    with pytest.raises(ValueError, match=r"weight has the sizes \[47, 32\], which 16 must divide"):
        float8_linear(x, [weight[:47]], [None], emulated=True)
    refused(ValueError, r"bias must be \[48\], got \[32\]", float8_linear, x, [weight], [x[0]], emulated=True)
    refused(ValueError, "one entry for each weight, got 0 for 1", float8_linear, x, [weight], [], emulated=True)
    with pytest.raises(ValueError, match=r"weight has the sizes \[48, 32\], which 128 must divide"):
        float8_linear(x, [weight], [None], recipe="fp8_blockwise", emulated=True)
    with pytest.raises(ValueError, match="recipe must be one of 'fp8_rowwise', 'fp8_blockwise', 'mxfp8', got 'fp8'"):
        float8_linear(x, [weight], [None], recipe="fp8", emulated=True)
    assert "mxfp8 products need a GPU" in (device_problem(torch.device("cpu"), "mxfp8") or "")


@pytest.mark.parametrize(
    ("capability", "fits"),
    [
        ((8, 0), []), ((8, 6), []), ((8, 9), ["fp8_rowwise"]), ((9, 0), ["fp8_rowwise", "fp8_blockwise"]),
        ((10, 0), ["fp8_rowwise", "mxfp8"]), ((12, 0), ["fp8_rowwise", "mxfp8"]),
    ],
)  # fmt: skip
def test_gpus_without_a_recipe_are_refused_and_others_named(monkeypatch, capability, fits):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    for name in RECIPES:
        found = device_problem(torch.device("cuda", 0), name)
        if name in fits:
            assert found is None
        else:
            assert found.endswith(f"; {' or '.join(fits)} would work" if fits else "has 8." + str(capability[1]))
            assert found.startswith(f"{name} products need a GPU of compute capability")


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_layers_refuse_main_grad(kind):
    layer = kind(32, 32, tp_mesh=None, dtype=torch.bfloat16)
    layer.precision, layer.emulated = "mxfp8", True
    layer.main_grad = torch.zeros(32, 32)
    refused(ValueError, f"{kind.__name__}: main_grad cannot be used with mxfp8", layer, drawn(4, 32))
