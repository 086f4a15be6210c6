"""The linears of experts, whose three matmuls are in float8, by a recipe of ``ops.float8_recipes``.

    y[rows of e]   = q(x) q(W[e])^T                rows of x and of W[e]
    dx[rows of e]  = q(dy) q(W[e]^T)^T             rows of dy and of W[e]^T
    dW[e]          = q(dy^T) q(x^T)^T              rows of dy^T and of x^T, over the rows of e

As in ``float8_linear`` each matrix is quantized once by row and once by column, and the halves of a split backward read
what they need: the input half dy and W, the weight half dy and x. All values are e4m3, gradients too, since torch's
grouped matmuls take nothing else (aten/src/ATen/native/cuda/GroupedBlas.cpp).

On compute capabilities 9 (by row) and 10 (MXFP8) ``torch.nn.functional.scaled_grouped_mm`` computes all experts and the
host never waits for ``offs``. Elsewhere, and in blocks of 128, for which torch has no grouped matmul, the host
waits once for each matmul and starts a ``scaled_mm`` for each expert.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_ops._internal.dispatch.autograd import once_differentiable
from parallel_ops._internal.dispatch.checks import check_same_device, has_values
from parallel_ops._internal.dispatch.registration import cast_to_autocast_dtype
from parallel_ops._internal.gradients.grouped_matmul import MAX_GROUPS, check_ends, groups, sums
from parallel_ops._internal.gradients.split_backward import check_memory, requested
from parallel_ops._internal.gradients.weight_gradients import (
    DeferredWeightGradients,
    ParameterGrad,
    after_backward,
)
from parallel_ops.ops.float8_recipes import (
    E4M3,
    RECIPES,
    Float8Recipe,
    Quantized,
    Recipe,
    product,
    quantize,
    quantize_groups,
    swizzled,
)

_NAME = "float8_grouped_linear"
# Majors of the compute capabilities for which torch has grouped matmuls. By row it takes a GPU of 10, too, but runs its
# one kernel there (ScaledGroupMM.cu), which is for 9 and traps: the process can use the GPU no more
# (pytorch/pytorch#187095, pytorch/ao#2904).
_MAJORS = {"fp8_rowwise": (9,), "mxfp8": (10,)}


def float8_grouped_linear(
    x: Tensor, weight: Tensor, offs: Tensor, *, bias: Tensor | None = None, recipe: Float8Recipe = "fp8_rowwise",
    emulated: bool = False, main_grad: ParameterGrad | None = None, deferred: DeferredWeightGradients | None = None,
) -> Tensor:  # fmt: skip
    """``x W[e]^T + b[e]`` for the rows of each expert e, forward and backward by float8 matmuls.

    Args:
        x: ``[r, in]``, bfloat16, rows sorted by expert; under autocast to bfloat16 any floating dtype.
        weight: ``[n, out, in]`` for n experts, dtype of ``x``; ``in`` and ``out`` are multiples of 16, with
            ``"fp8_blockwise"`` of 128, with ``"mxfp8"`` of 32.
        offs: ``[n]``, int32 or int64: where the rows of each expert end. They, and r, are multiples of 16, with the
            other recipes of 128, as ``sort_by_expert(..., multiple=RECIPES[recipe].rows)`` makes them, with rows of
            zeros; on a GPU this is not checked. Rows past the last end are padding.
        bias: ``[n, out]`` or ``None``.
        recipe, emulated: see ``float8_linear``.
        main_grad, deferred: a queue that computes the weight's gradient later, and what it adds it to. By default
            autograd gets it.

    Returns:
        ``[r, out]``, bfloat16; 0 in rows past the last end. Gradients are bfloat16.

    Raises:
        TypeError: another dtype. ValueError: sizes that do not fit; an unknown recipe; a device without float8, unless
            ``emulated``.

    Sharding: experts, with the rows of x that are theirs, may be split over ranks.

    Examples:
        >>> import torch
        >>> from parallel_ops import float8_grouped_linear
        >>> x, weight = torch.randn(48, 32).bfloat16(), torch.randn(2, 16, 32).bfloat16()  # two experts
        >>> offs = torch.tensor([32, 48])
        >>> y = float8_grouped_linear(x, weight, offs, emulated=True)
        >>> y.shape, bool((y[32:] - x[32:] @ weight[1].T).abs().max() < 2)
        (torch.Size([48, 16]), True)
    """
    if recipe not in RECIPES:
        raise ValueError(f"{_NAME}: recipe must be one of {', '.join(map(repr, RECIPES))}, got {recipe!r}")
    if torch.is_autocast_enabled(x.device.type):
        to = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = cast_to_autocast_dtype(to, (x, weight, bias))
    _check(x, weight, offs, bias, RECIPES[recipe], emulated)
    if not (weight.requires_grad and deferred is not None):
        main_grad = deferred = None
    y: Tensor = _Float8Grouped.apply(RECIPES[recipe], emulated, main_grad, deferred, x, weight, offs, bias)
    return y


def _check(x: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None, form: Recipe, emulated: bool) -> None:
    if not emulated and not x.is_cuda:
        raise ValueError(f"{_NAME}: x is on {x.device}, where products are not in float8; use emulated=True")
    for name, t in (("x", x), ("weight", weight), ("bias", bias), ("offs", offs)):
        if t is not None:
            check_same_device(_NAME, name, t, "x", x)
            if t is not offs and t.dtype is not torch.bfloat16:
                raise TypeError(f"{_NAME}: {name} must be bfloat16, got {t.dtype}; cast it, or run under autocast")
    if x.dim() != 2 or weight.dim() != 3 or weight.shape[2] != x.shape[1] or not weight.shape[0]:
        raise ValueError(
            f"{_NAME}: x must be [rows, in] and weight [experts, out, in], got {list(x.shape)} and {list(weight.shape)}"
        )
    if any(size % form.multiple for size in weight.shape[1:]):
        raise ValueError(f"{_NAME}: weight has the sizes {list(weight.shape)}, the last of which {form.multiple} must "
                         "divide")  # fmt: skip
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ValueError(f"{_NAME}: bias must have shape {list(weight.shape[:2])}, got {list(bias.shape)}")
    if offs.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{_NAME}: offs must be a tensor of int32 or int64, got {offs.dtype}")
    if offs.shape != weight.shape[:1]:
        raise ValueError(f"{_NAME}: offs must have shape [{len(weight)}], one for each expert, got {list(offs.shape)}")
    if x.shape[0] % form.rows:
        raise ValueError(f"{_NAME}: x has {x.shape[0]} rows, which {form.rows} must divide")
    if has_values(offs):
        check_ends(_NAME, offs, x.shape[0])
        if wrong := [end for end in offs.tolist() if end % form.rows]:
            raise ValueError(f"{_NAME}: offs must be multiples of {form.rows}, got {wrong[0]}")


class _Float8Grouped(torch.autograd.Function):
    """Plain torch around opaque matmuls, so that ``torch.compile`` makes each quantization one kernel."""

    @staticmethod
    def forward(
        ctx: Any, form: Recipe, emulated: bool, target: ParameterGrad | None, deferred: DeferredWeightGradients | None,
        x: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.form, ctx.emulated, ctx.target, ctx.deferred = form, emulated, target, deferred
        ctx.save_for_backward(x, weight, offs)
        y = _multiply(quantize(x, E4M3, form), _experts(weight, form), offs, form, emulated=emulated)
        if bias is not None:
            places = torch.arange(len(x), dtype=offs.dtype, device=x.device)
            added = bias[torch.searchsorted(offs, places, right=True).clamp_(max=len(offs) - 1)]
            y = y + added.masked_fill((places >= offs[-1])[:, None], 0)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offs = ctx.saved_tensors
        form, emulated, target = ctx.form, ctx.emulated, ctx.target
        compiling = torch.compiler.is_compiling()  # a compiled backward computes all gradients
        needed = ctx.needs_input_grad if compiling else requested(ctx)
        dx = dweight = None
        if needed[4]:
            if not compiling:
                check_memory(_NAME, "weight", weight)
            rows, columns = quantize(dy, E4M3, form), _experts(weight, form, transposed=True)
            dx = _multiply(rows, columns, offs, form, emulated=emulated, gradient=True)
        if needed[5]:

            def compute() -> Tensor:
                left, right = (quantize_groups(t, offs, form) for t in (dy, x))
                return _multiply(left, right, offs, form, emulated=emulated, gradient=True)

            if target is None:
                dweight = compute()
            else:
                ctx.deferred.push(after_backward(lambda: target.add_whole(compute()), dy, x, offs))
        return None, None, None, None, dx, dweight, None, _sums(dy, offs) if needed[7] else None


_Float8Grouped.backward = staticmethod(once_differentiable(_NAME, _Float8Grouped.backward))  # type: ignore[method-assign]


def _experts(weight: Tensor, form: Recipe, *, transposed: bool = False) -> Quantized:
    """``[n, out, in]`` in float8, or with ``transposed`` ``[n, in, out]``, with scales along the last dimension."""
    turned = weight.mT if transposed and not form.square else weight
    values, scales, square = quantize(turned.flatten(0, 1), E4M3, form, weight=True)
    values, scales = (t.unflatten(0, (len(weight), -1)) for t in (values, scales))
    if transposed and square:  # the transpose has the same scales
        values, scales = values.mT.contiguous(), scales.mT
    return Quantized(values, scales, square)


def _multiply(
    a: Quantized, b: Quantized, offs: Tensor, form: Recipe, *, emulated: bool, gradient: bool = False
) -> Tensor:
    """``[r, N]`` of a ``[r, K]`` and b ``[n, N, K]``; of b ``[K, r]`` and a ``[N, r]`` ``[n, N, K]``."""
    product: Tensor = _product(*a[:2], *b[:2], offs, form.name, emulated, gradient)
    return product


@torch.library.custom_op("parallel_ops::float8_grouped_product", mutates_args=())
def _product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, offs: Tensor, recipe: str, emulated: bool, gradient: bool
) -> Tensor:
    form, summed = RECIPES[recipe], b.dim() == 2
    if not emulated and a.is_cuda and a.numel() and len(offs) <= MAX_GROUPS and one_kernel_for(a.device, recipe):
        y = _kernel(Quantized(a, a_scales), Quantized(b, b_scales), offs, form, gradient)
        if summed:  # a group without rows has what was in memory (pytorch/pytorch#172439)
            return y.masked_fill_((offs.diff(prepend=offs.new_zeros(1)) == 0)[:, None, None], 0)
        return y.masked_fill_((torch.arange(len(y), device=y.device) >= offs[-1])[:, None], 0)
    y = a.new_zeros((len(offs), len(a), len(b)) if summed else (len(a), b.shape[1]), dtype=torch.bfloat16)
    for group, start, end in groups(offs):
        if summed:
            left, right = (_part(Quantized(*t), group, start, end) for t in ((a, a_scales), (b, b_scales)))
            y[group] = product(left, right, form, emulated=emulated, gradient=gradient)
        else:
            y[start:end] = product(
                Quantized(a[start:end], a_scales[start:end]), Quantized(b[group], b_scales[group], form.square), form,
                emulated=emulated, gradient=gradient,
            )  # fmt: skip
    return y


@_product.register_fake
def _(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, offs: Tensor, recipe: str, emulated: bool, gradient: bool
) -> Tensor:
    shape = (len(offs), len(a), len(b)) if b.dim() == 2 else (len(a), b.shape[1])
    return a.new_empty(shape, dtype=torch.bfloat16)


@functools.cache
def one_kernel_for(device: torch.device, recipe: str) -> bool:
    """Whether torch has a grouped matmul for this GPU, else the host waits for ``offs``.

    That of MXFP8 is not in every build (USE_FBGEMM_GENAI).
    """
    if torch.cuda.get_device_capability(device)[0] not in _MAJORS.get(recipe, ()):
        return False
    form, x = RECIPES[recipe], torch.zeros(128, 128, device=device, dtype=torch.bfloat16)
    offs = torch.full((1,), 128, device=device)
    try:
        _kernel(quantize(x, E4M3, form), _experts(x[None], form), offs, form, False)
    except NotImplementedError:
        return False
    return True


def _part(t: Quantized, group: int, start: int, end: int) -> Quantized:
    """The columns of a group. Scales of rows are ``[n, rows, 1]``, those of blocks ``[rows, blocks]``."""
    values = t.values[:, start:end].contiguous()
    if t.scales.dim() == 3:
        return Quantized(values, t.scales[group])
    block = t.values.shape[1] // t.scales.shape[1]
    return Quantized(values, t.scales[:, start // block : end // block])


def _kernel(a: Quantized, b: Quantized, offs: Tensor, form: Recipe, gradient: bool) -> Tensor:
    """torch's grouped matmul. Layouts of scales: GroupedBlas.cpp, and PyTorch's test_scaled_matmul_cuda.py."""
    kind, swizzle = F.ScalingType.RowWise, F.SwizzleType.NO_SWIZZLE
    if form.block:
        kind, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
        bytes_of = [t.scales.to(torch.float8_e8m0fnu) for t in (a, b)]
        if b.values.dim() == 2:
            scales = [_swizzled_groups(t, offs // form.block) for t in bytes_of]
        else:
            scales = [swizzled(bytes_of[0]).view(len(a.values), -1), swizzled(bytes_of[1])]
    elif b.values.dim() == 2:
        scales = [t.scales.flatten() for t in (a, b)]  # [n * rows]
    else:
        scales = [a.scales.flatten(), b.scales.squeeze(2)]
    y: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        a.values, b.values.mT, scale_a=scales[0], scale_recipe_a=kind, scale_b=scales[1], scale_recipe_b=kind,
        swizzle_a=swizzle, swizzle_b=swizzle, offs=offs.int(), output_dtype=torch.bfloat16, use_fast_accum=not gradient,
    )  # fmt: skip
    return y


def _swizzled_groups(scales: Tensor, offs: Tensor) -> Tensor:
    """Scales ``[rows, blocks]`` of groups of columns, each ``swizzled`` by itself, one after another.

    Args:
        offs: Where the blocks of each group end, multiples of 4.
    """
    tiles = swizzled(scales).view(-(-scales.shape[0] // 128), -1, 512)  # [row tiles, column tiles, bytes]
    rows, columns = tiles.shape[:2]
    offs = offs // 4
    column = torch.arange(columns, dtype=offs.dtype, device=offs.device)
    bounds = torch.cat([offs.new_zeros(1), offs, offs.new_full((1,), columns)])  # behind the last group: another
    group = torch.searchsorted(offs, column, right=True)
    start, width = bounds[group], bounds.diff()[group]
    places = rows * start + torch.arange(rows, dtype=offs.dtype, device=offs.device)[:, None] * width + column - start
    found = torch.empty_like(tiles).view(torch.uint8).view(-1, 512)
    found[places.flatten().long()] = tiles.view(torch.uint8).flatten(0, 1)
    return found.view(scales.dtype).view(rows * 128, -1)


@torch.library.custom_op("parallel_ops::float8_grouped_sums", mutates_args=())
def _sums(dy: Tensor, offs: Tensor) -> Tensor:
    return sums(dy, offs)


@_sums.register_fake
def _(dy: Tensor, offs: Tensor) -> Tensor:
    return dy.new_empty(len(offs), dy.shape[1])
