"""Linears with float8 products: quantization by row, products within the formats' error, gradients, refusals."""

import pytest
import torch
import torch.nn.functional as F

from parallel_ops.layers import ColumnParallelLinear, RowParallelLinear
from parallel_ops.ops.float8_linear import _Float8Linear, device_problem, float8_linear, quantize_rows
from parallel_ops.tensor_parallel import DeferredWeightGradients

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Half a unit in the last place, relative: 3 and 2 bits of mantissa.
ROUNDING = {E4M3: 2.0**-4, E5M2: 2.0**-3}
# Half the smallest subnormal, relative to the largest value.
UNDERFLOW = {E4M3: 2.0**-10 / 448, E5M2: 2.0**-17 / 57344}


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


@pytest.mark.parametrize("rows", [(5,), (16,), (3, 7)])
def test_products_against_fp64(rows):
    """Each within the sum of the errors of its factors."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(*rows, n, generator=generator).bfloat16() for n in (64, 48))
    weight, bias = (torch.randn(*n, generator=generator).bfloat16() for n in ((48, 64), (48,)))
    given = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = float8_linear(given[0], [given[1]], [given[2]], emulated=True)[0]
    y.backward(dy)
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = F.linear(*exact)
    expected.backward(dy.double())
    flat, out = x.double().flatten(0, -2).abs(), dy.double().flatten(0, -2).abs()
    wide = weight.double().abs()
    for got, wanted, bound, formats in (
        (y, expected, flat @ wide.t(), (E4M3, E4M3)),
        (given[0].grad, exact[0].grad, out @ wide, (E5M2, E4M3)),
        (given[1].grad, exact[1].grad, out.t() @ flat, (E5M2, E4M3)),
    ):
        assert got.dtype is torch.bfloat16 and got.shape == wanted.shape
        error = (got.double() - wanted).flatten(0, -2).abs()
        worst = sum(ROUNDING[f] for f in formats) + ROUNDING[formats[0]] * ROUNDING[formats[1]]
        assert (error <= 1.02 * worst * bound + 2.0**-7 * wanted.abs().flatten(0, -2) + 1e-2).all()
        # Errors are independent, so that their sum is far smaller than the worst; and there are some.
        assert 1e-3 < error.norm() / wanted.norm() < worst / 2
    torch.testing.assert_close(given[2].grad.double(), exact[2].grad, rtol=2.0**-8, atol=0)


def test_gradients_are_summed_outside_of_the_tensor_cores(monkeypatch):
    """By their formats: e5m2 is that of an output's gradient."""
    calls = []

    def product(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
        calls.append((a.dtype, use_fast_accum))
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    x, weight = drawn(16, 32).requires_grad_(), drawn(16, 32, seed=3).requires_grad_()
    _Float8Linear.apply(False, 1, x, weight, None)[0].backward(drawn(16, 16))
    assert calls == [(E4M3, True), (E5M2, False), (E5M2, False)]


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
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(y, [x], create_graph=True)


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
    up, down = ColumnParallelLinear(32, 48, mesh=None), RowParallelLinear(48, 32, mesh=None)
    x = torch.randn(6, 2, 32, requires_grad=True)
    up.float8 = down.float8 = "emulated"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = down(up(x))
    assert y.dtype is torch.bfloat16
    y.float().square().sum().backward()
    gradients = [t.grad for t in (x, up.weight, up.bias, down.weight, down.bias)]
    assert all(g is not None and g.dtype is torch.float32 and g.any() for g in gradients)


def test_refusals():
    x, weight = drawn(16, 32), drawn(48, 32)
    with pytest.raises(ValueError, match=r"x is on cpu, .* emulated=True"):
        float8_linear(x, [weight], [None])
    with pytest.raises(TypeError, match=r"x must be bfloat16, got torch\.float32"):
        float8_linear(x.float(), [weight], [None], emulated=True)
    with pytest.raises(ValueError, match=r"weight must be \[N, 32\].*got \[48, 16\]"):
        float8_linear(x, [weight[:, :16]], [None], emulated=True)
    with pytest.raises(ValueError, match=r"weight has the sizes \[47, 32\], which 16 must divide"):
        float8_linear(x, [weight[:47]], [None], emulated=True)
    with pytest.raises(ValueError, match=r"bias must be \[48\], got \[32\]"):
        float8_linear(x, [weight], [x[0]], emulated=True)
    with pytest.raises(ValueError, match="one entry for each weight, got 0 for 1"):
        float8_linear(x, [weight], [], emulated=True)
    assert "need a GPU" in (device_problem(torch.device("cpu")) or "")


@pytest.mark.parametrize(("capability", "fits"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_without_float8_are_refused(monkeypatch, capability, fits):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    found = device_problem(torch.device("cuda", 0))
    assert found is None if fits else "8.9" in found and ".".join(map(str, capability)) in found


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_layers_refuse_other_weight_gradients(kind):
    layer = kind(32, 32, mesh=None, dtype=torch.bfloat16)
    layer.float8 = "emulated"
    layer.deferred = DeferredWeightGradients()
    with pytest.raises(ValueError, match=f"{kind.__name__}: main_grad and deferred cannot be used with float8"):
        layer(drawn(4, 32))
