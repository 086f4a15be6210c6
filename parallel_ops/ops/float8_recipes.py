"""How matrices are quantized to float8, and matmuls of such matrices.

    recipe          one scale for                       scales     gradients
    fp8_rowwise     a row                               fp32       e5m2
    fp8_blockwise   128 of a row; 128 x 128 of weights  fp32       e4m3
    mxfp8           32 of a row                         2^n        e4m3

Rows are what a matmul sums over: ``A B^T`` of A ``[M, K]`` and B ``[N, K]``, all values e4m3 but gradients by row. A
scale is the largest magnitude of its part over the format's maximum; for MXFP8 the next power of two, so that nothing
is clipped.

Sources: Micikevicius et al., arXiv:2209.05433 (formats); DeepSeek-V3, arXiv:2412.19437, section 3.3 (blocks of 128);
OCP Microscaling Formats 1.0 and, for rounding scales up, Mishra et al., arXiv:2506.08027 (MXFP8). Layouts of scales on
CUDA: cuBLAS, "Block scaling factors layout", as PyTorch's test_scaled_matmul_cuda.py passes them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Float8Recipe = Literal["fp8_rowwise", "fp8_blockwise", "mxfp8"]
# How the matmuls of a linear are computed.
Precision = Literal["bf16", "fp8_rowwise", "fp8_blockwise", "mxfp8"]
PRECISIONS = ("bf16", "fp8_rowwise", "fp8_blockwise", "mxfp8")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The smallest normal fp32: scales below it would be flushed to zero on some devices.
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Recipe:
    """One row of the table above.

    Attributes:
        block: Elements of a row that share a scale; 0 for a row. square: Scales of weights are for ``block x block``.
        gradient: Format of output gradients.
        multiple: What the sizes of weights must be multiples of, as tokens are padded to be.
        rows: Likewise the rows of each expert: for MXFP8 those of a tile of scales.
        capabilities: The least compute capability of a GPU, and that from which on torch has no kernel.
    """

    name: Float8Recipe
    block: int
    square: bool
    gradient: torch.dtype
    multiple: int
    rows: int
    capabilities: tuple[tuple[int, int], tuple[int, int] | None]
    needs: str


RECIPES: dict[str, Recipe] = {
    "fp8_rowwise": Recipe(
        "fp8_rowwise", 0, False, E5M2, 16, 16, ((8, 9), None), "8.9 or more (Ada, Hopper and later)"
    ),
    "fp8_blockwise": Recipe("fp8_blockwise", 128, True, E4M3, 128, 128, ((9, 0), (9, 1)), "9.0 (Hopper)"),
    "mxfp8": Recipe("mxfp8", 32, False, E4M3, 32, 128, ((10, 0), None), "10.0 or more (Blackwell)"),
}  # fmt: skip


class Quantized(NamedTuple):
    """A matrix in float8.

    Attributes:
        values: ``[rows, columns]``, contiguous.
        scales: ``[rows, blocks]`` fp32, or ``[row blocks, blocks]`` if ``square``: ``values * scale`` is the matrix.
    """

    values: Tensor
    scales: Tensor
    square: bool = False

    def transposed(self) -> "Quantized":
        """Of a matrix in square blocks, whose scales are those of its transpose too."""
        assert self.square
        return Quantized(self.values.t().contiguous(), self.scales.t(), True)

    def wide(self) -> Tensor:
        """The matrix in fp32."""
        scales, (rows, columns) = self.scales, self.values.shape
        if self.square:
            scales = scales.repeat_interleave(rows // max(1, len(scales)), 0)
        return self.values.float() * scales.repeat_interleave(columns // max(1, scales.shape[1]), 1)


def quantize(
    t: Tensor, dtype: torch.dtype, recipe: Recipe, *, weight: bool = False,
    largest: Callable[[Tensor], Tensor] | None = None,
) -> Quantized:  # fmt: skip
    """A matrix in float8, with scales along its rows.

    Args:
        t: ``[rows, columns]``, floating-point, any strides; ``recipe.block`` divides columns, and rows of a ``weight``
            in square blocks. dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        largest: Makes of the largest magnitudes of rows those of the rows of all ranks, of which t has a part. For
            scales of rows.

    Parts of zeros stay zeros; a part with NaN or infinity has values or a scale that are not finite.
    """
    square = weight and recipe.square
    most, (rows, columns) = torch.finfo(dtype).max, t.shape
    if columns == 0:
        magnitudes = t.new_zeros(rows, int(not recipe.block), 1, dtype=torch.float32)
        if largest is not None and not recipe.block:
            magnitudes = largest(magnitudes)
        return Quantized(t.to(dtype).contiguous(), magnitudes.div(most).clamp(min=_TINY).squeeze(2))
    block = recipe.block or columns
    parts = t.float().unflatten(1, (-1, block))
    if square:
        parts = parts.unflatten(0, (-1, block))  # [row blocks, block, blocks, block]
    magnitudes = parts.abs().amax(dim=(1, 3) if square else 2, keepdim=True)
    if largest is not None and not recipe.block:
        magnitudes = largest(magnitudes)
    scales = magnitudes.div(most).clamp(min=_TINY)
    if recipe.name == "mxfp8":
        # frexp: scale = mantissa * 2^n with a mantissa from 0.5 to 1, which is 2^(n - 1) if it is 0.5.
        mantissa, power = torch.frexp(scales)
        power = torch.where(mantissa == 0.5, power - 1, power)
        scales = torch.where(scales.isfinite(), torch.ldexp(torch.ones_like(scales), power), scales)
    # The quotient may round to more than the maximum, which some casts make NaN. clamp keeps NaN.
    values = (parts / scales).clamp(-most, most).to(dtype).reshape(rows, columns)
    return Quantized(values.contiguous(), scales.reshape(-1, columns // block), square)


def quantize_groups(t: Tensor, ends: Tensor, recipe: Recipe) -> Quantized:
    """The transpose of a matrix in e4m3, with scales for each group of rows that is summed over.

    Args:
        t: ``[rows, columns]``, floating-point. ends: ``[n]``, where the groups end; ``recipe.rows`` divides them.

    Returns:
        ``[columns, rows]`` with scales of ``[columns, blocks]``, or by row of ``[n, columns, 1]``.
    """
    if recipe.block:
        return quantize(t.t(), E4M3, recipe)
    most, rows = torch.finfo(E4M3).max, torch.arange(len(t), dtype=ends.dtype, device=t.device)
    group = torch.searchsorted(ends, rows, right=True)  # n for rows behind the last
    most_of = t.new_zeros(len(ends) + 1, t.shape[1]).scatter_reduce(0, group[:, None].expand_as(t), t.abs(), "amax")
    scales = most_of.float().div(most).clamp(min=_TINY)
    values = (t.float() / scales[group]).clamp(-most, most).to(E4M3)
    return Quantized(values.t().contiguous(), scales[:-1, :, None])


def product(a: Quantized, b: Quantized, recipe: Recipe, *, emulated: bool, gradient: bool = False) -> Tensor:
    """``A B^T``, ``[M, N]`` in bfloat16, of A ``[M, K]`` and B ``[N, K]``.

    Args:
        emulated: Multiply in fp32, on any device.
        gradient: Add the tensor cores' partial sums of row-wise matmuls in fp32 registers. Otherwise they stay in the
            tensor cores, which is faster and less exact. Transformer Engine and torchao choose alike.
    """
    if emulated:
        return (a.wide() @ b.wide().t()).bfloat16()
    if not recipe.block:
        return torch._scaled_mm(
            a.values, b.values.t(), scale_a=a.scales, scale_b=b.scales.t(), out_dtype=torch.bfloat16,
            use_fast_accum=not gradient,
        )  # fmt: skip
    kinds, scales = zip(*(_on_device(t, recipe) for t in (a, b)), strict=True)
    swizzle = F.SwizzleType.SWIZZLE_32_4_4 if recipe.name == "mxfp8" else F.SwizzleType.NO_SWIZZLE
    return F.scaled_mm(
        a.values, b.values.t(), scale_a=scales[0], scale_recipe_a=kinds[0], scale_b=scales[1], scale_recipe_b=kinds[1],
        swizzle_a=swizzle, swizzle_b=swizzle, output_dtype=torch.bfloat16,
    )  # fmt: skip


def _on_device(t: Quantized, recipe: Recipe) -> tuple[F.ScalingType, Tensor]:
    """Scales as cuBLAS has them in memory."""
    if recipe.name == "mxfp8":
        return F.ScalingType.BlockWise1x32, swizzled(t.scales.to(torch.float8_e8m0fnu))
    if t.square:  # [row blocks, blocks] to [blocks up to a multiple of 4, row blocks], blocks contiguous
        return F.ScalingType.BlockWise128x128, F.pad(t.scales, (0, -t.scales.shape[1] % 4)).contiguous().t()
    return F.ScalingType.BlockWise1x128, t.scales.t().contiguous().t()


def swizzled(scales: Tensor) -> Tensor:
    """``[..., rows, blocks]`` of bytes to vectors: tiles of 128 x 4, one after another along rows of tiles, each as 32
    x 4 x 4: row ``32 i + j`` of a tile is at ``[j, i]``. Missing rows and blocks are 0."""
    rows, blocks = scales.shape[-2:]
    whole = F.pad(scales.view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    tiles = whole.unflatten(-2, (-1, 4, 32)).unflatten(-1, (-1, 4))  # [..., row tiles, i, j, column tiles, 4]
    return tiles.movedim(-2, -4).transpose(-2, -3).flatten(-5).view(scales.dtype)


def device_problem(device: torch.device, name: str) -> str | None:
    """Why a device has no matmuls of a recipe, and which it has; ``None`` if it has."""
    recipe = RECIPES[name]
    if device.type != "cuda":
        return f"{name} products need a GPU, and the device is {device.type}"
    capability = torch.cuda.get_device_capability(device)

    def fits(other: Recipe) -> bool:
        least, end = other.capabilities
        return capability >= least and (end is None or capability < end)

    if fits(recipe):
        return None
    others = [other.name for other in RECIPES.values() if fits(other)]
    would = f"; {' or '.join(others)} would work" if others else ""
    return (
        f"{name} products need a GPU of compute capability {recipe.needs}, and "
        f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}{would}"
    )
