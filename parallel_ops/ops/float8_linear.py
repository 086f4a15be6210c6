"""Linears whose three matmuls are in float8, by one of the recipes of ``ops.float8_recipes``.

    Y     = q(X) q(W)^T                 rows of X and of W
    dX    = q(dY) q(W^T)^T              rows of dY and of W^T
    dW    = q(dY^T) q(X^T)^T            rows of dY^T and of X^T

A row is always what the matmul sums over. Each matrix is quantized by row and by column, from 16 bits: saved are X and
W as they are, as ``F.linear`` does, so other ops share the memory. Weights in square blocks have the same values
both times, since their transpose has the same scales. Scales are of the current values: there is no history to keep.

In a split backward the input half computes dX, of dY by rows; the weight half, or a queue later, quantizes dY and X by
columns. ``torch._scaled_mm`` by row takes e5m2 as its first operand only and rounds its sums to bfloat16
(aten/src/ATen/native/cuda/RowwiseScaledMM.cu).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.autograd import once_differentiable
from parallel_ops._internal.dispatch.checks import check_same_device
from parallel_ops._internal.gradients.split_backward import requested
from parallel_ops._internal.gradients.weight_gradients import (
    DeferredWeightGradients,
    ParameterGrad,
    Target,
    after_backward,
)
from parallel_ops.ops.float8_recipes import E4M3, RECIPES, Float8Recipe, Quantized, Recipe, product, quantize

_NAME = "float8_linear"


def _padded(t: Tensor, multiple: int) -> Tensor:
    """A matrix with rows of zeros up to a multiple: they add nothing to a sum over rows."""
    missing = -t.shape[0] % multiple
    return torch.nn.functional.pad(t, (0, 0, 0, missing)) if missing else t


class SharedRows(Protocol):
    """How ranks share the rows of x; see ``tensor_parallel.linear.float8``. ``x`` is ``[rows, H]``."""

    @property
    def sizes(self) -> Sequence[int]: ...
    def by_row(self, x: Tensor, recipe: Recipe) -> Quantized: ...
    def by_column(self, x: Tensor, recipe: Recipe) -> Quantized: ...
    def scattered(self, dx: Tensor) -> Tensor: ...


def _columns(t: Tensor, dtype: torch.dtype, recipe: Recipe) -> Quantized:
    return quantize(_padded(t, recipe.multiple).t(), dtype, recipe)


class _Float8Linear(torch.autograd.Function):
    """Plain torch, so that ``torch.compile`` makes each quantization one kernel."""

    @staticmethod
    def forward(
        ctx: Any, recipe: Recipe, emulated: bool, later: Any, shared: SharedRows | None, count: int, x: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        weights = [w for w in parameters[:count] if w is not None]
        flat, outputs = x.flatten(0, -2), []
        rows = quantize(flat, E4M3, recipe) if shared is None else shared.by_row(flat, recipe)  # once for all weights
        shape = (x.shape[0] if shared is None else sum(shared.sizes), *x.shape[1:-1])
        quantized = [quantize(weight, E4M3, recipe, weight=True) for weight in weights]
        for weight, bias in zip(quantized, parameters[count:], strict=True):
            y = product(rows, weight, recipe, emulated=emulated)
            outputs.append((y if bias is None else y + bias).view(*shape, len(weight.values)))
        ctx.save_for_backward(x, *weights)
        ctx.recipe, ctx.emulated, ctx.later, ctx.shared, ctx.count = recipe, emulated, later, shared, count
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        recipe, emulated, shared, count = ctx.recipe, ctx.emulated, ctx.shared, ctx.count
        # A compiled backward computes all gradients.
        needed = ctx.needs_input_grad if torch.compiler.is_compiling() else requested(ctx)
        of_weights, of_biases = needed[6 : 6 + count], needed[6 + count :]
        dys = [grad.flatten(0, -2) for grad in grads]
        dx: Tensor | None = None
        if needed[5]:
            for dy, weight in zip(dys, weights, strict=True):
                rows = quantize(dy, recipe.gradient, recipe)
                if recipe.square:
                    other = quantize(weight, E4M3, recipe, weight=True).transposed()
                else:
                    other = quantize(weight.t(), E4M3, recipe)
                part = product(rows, other, recipe, emulated=emulated, gradient=True)
                dx = part if dx is None else dx + part
            assert dx is not None
            dx = dx.view(*grads[0].shape[:-1], x.shape[-1])
            dx = dx if shared is None else shared.scattered(dx)
        found: list[Tensor | None] = [None] * count

        def of_weight(dy: Tensor, columns: Quantized) -> Tensor:
            return product(_columns(dy, recipe.gradient, recipe), columns, recipe, emulated=emulated, gradient=True)

        flat = x.flatten(0, -2)

        def columns_of_x() -> Quantized:
            if shared is None:
                return _columns(flat, E4M3, recipe)
            found = shared.by_column(flat, recipe)
            padded = _padded(found.values.view(torch.uint8).t(), recipe.multiple).t().contiguous()
            return Quantized(padded.view(E4M3), found.scales)

        if ctx.later is not None and any(of_weights):
            queue, targets = ctx.later

            def compute() -> None:
                columns = columns_of_x()
                for target, dy in zip(targets, dys, strict=True):
                    if target is not None:
                        target.add_whole(of_weight(dy, columns))

            queue.push(after_backward(compute, flat, *dys))
        elif any(of_weights):
            columns = columns_of_x()
            found = [of_weight(dy, columns) if need else None for dy, need in zip(dys, of_weights, strict=True)]
        summed = [
            dy.sum(0, dtype=torch.float32).to(dy.dtype) if need else None
            for dy, need in zip(dys, of_biases, strict=True)
        ]
        return None, None, None, None, None, dx, *found, *summed


_Float8Linear.backward = staticmethod(once_differentiable(_NAME, _Float8Linear.backward))  # type: ignore[method-assign]


def float8_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, recipe: Float8Recipe = "fp8_rowwise",
    emulated: bool = False, deferred: DeferredWeightGradients | None = None,
    targets: Sequence[Target] | None = None, shared: SharedRows | None = None,
) -> list[Tensor]:  # fmt: skip
    """``F.linear`` of one input with several weights, forward and backward by float8 matmuls.

    Args:
        x: ``[..., H]``, bfloat16; under autocast to bfloat16 any floating dtype.
        weights: ``[N, H]`` each, dtype and device of ``x``; H and N are multiples of 16, with ``"fp8_blockwise"`` of
            128, with ``"mxfp8"`` of 32.
        biases: ``[N]`` or ``None``, one for each weight.
        recipe: How matrices are quantized; see ``ops.float8_recipes``.
        emulated: quantize in the same way, but multiply in fp32: on any device, slower than bfloat16.
        deferred, targets: a queue that computes the weights' gradients later, and what it adds each to: a
            ``ParameterGrad``, or ``None`` for a weight without a gradient. By default autograd gets them.

        shared: ranks share the rows of x, which travel in float8. By default x has all.

    Returns:
        ``[..., N]`` for each weight, bfloat16. Gradients are bfloat16; those of biases are sums of the output's
        gradient as it came.

    Raises:
        TypeError: another dtype. ValueError: sizes that do not fit; an unknown recipe; a device without float8, unless
            ``emulated``.

    Sharding: x, weights and biases of one rank.

    Examples:
        >>> import torch
        >>> from parallel_ops import float8_linear
        >>> x, weight = torch.randn(4, 32).bfloat16(), torch.randn(16, 32).bfloat16()
        >>> (y,) = float8_linear(x, [weight], [None], emulated=True)
        >>> y.shape, bool((y - x @ weight.T).abs().max() < 2)
        (torch.Size([4, 16]), True)
    """
    if recipe not in RECIPES:
        raise ValueError(f"{_NAME}: recipe must be one of {', '.join(map(repr, RECIPES))}, got {recipe!r}")
    form = RECIPES[recipe]
    if torch.is_autocast_enabled(x.device.type):
        to = torch.get_autocast_dtype(x.device.type)
        x, weights = x.to(to), [w.to(to) for w in weights]
        biases = [None if b is None else b.to(to) for b in biases]
    if len(biases) != len(weights) or not weights:
        raise ValueError(f"{_NAME}: biases must have one entry for each weight, got {len(biases)} for {len(weights)}")
    if not emulated and not x.is_cuda:
        raise ValueError(f"{_NAME}: x is on {x.device}, where products are not in float8; use emulated=True")
    for name, t in [("x", x), *(("weight", w) for w in weights), *(("bias", b) for b in biases if b is not None)]:
        if t.dtype is not torch.bfloat16:
            raise TypeError(f"{_NAME}: {name} must be bfloat16, got {t.dtype}; cast it, or run under torch.autocast")
        check_same_device(_NAME, name, t, "x", x)
    for weight, bias in zip(weights, biases, strict=True):
        if x.dim() < 2 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{_NAME}: weight must be [N, {x.shape[-1] if x.dim() else 'H'}] for x of {list(x.shape)}, "
                f"got {list(weight.shape)}"
            )
        if any(size % form.multiple for size in weight.shape):
            raise ValueError(f"{_NAME}: weight has the sizes {list(weight.shape)}, which {form.multiple} must divide")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{_NAME}: bias must be [{weight.shape[0]}], got {list(bias.shape)}")
    later = None
    if deferred is not None and targets is not None and any(target is not None for target in targets):
        if wrong := [type(t).__name__ for t in targets if not isinstance(t, ParameterGrad | None)]:
            raise TypeError(f"{_NAME}: targets must be of ParameterGrad, got {wrong[0]}: products are rounded")
        later = deferred, list(targets)
    outputs: tuple[Tensor, ...] = _Float8Linear.apply(form, emulated, later, shared, len(weights), x, *weights, *biases)
    return list(outputs)
