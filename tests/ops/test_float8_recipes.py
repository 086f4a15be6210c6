"""Recipes of float8: scales by row and by block, products as cuBLAS takes them, GPUs that have them."""

import pytest
import torch
import torch.nn.functional as F

from parallel_ops.ops.float8_recipes import E4M3, E5M2, RECIPES, device_problem, product, quantize, swizzled
from support.numerics.suite import FLOAT8_ROUNDING as ROUNDING
from support.numerics.suite import rows_far_apart as drawn

# Half the smallest subnormal, relative to the largest value.
UNDERFLOW = {E4M3: 2.0**-10 / 448, E5M2: 2.0**-17 / 57344}


ROWS = RECIPES["fp8_rowwise"]


def quantize_rows(t, dtype):
    values, scales, _ = quantize(t, dtype, ROWS)
    return values, scales


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
