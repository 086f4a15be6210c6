"""Bias, dropout and residual addition in one pass, with a mask that is never stored.

    y        = r + m (x + b) / (1 - p)            r, b or both may be left out
    dx       = m dy / (1 - p)                     dr = dy, the tensor itself
    db[j]    = sum over rows i of dx[i, j]        (fp32 partial sums in an order set by the shape)

    m[i]     = Philox4x32-10(key = seed, counter = i >> 2)[i & 3] >= round(p 2^32)
    i        = index_offset + position of the element in contiguous order, row t counted as row row_positions[t]

Saved for backward: the seed, 8 bytes; backward draws m again. Since m depends on the seed and the global index only,
a shard with the right index_offset or row_positions draws what the whole tensor would have drawn, on any device. Where
m = 0, x contributes nothing, not even a NaN. The fusion is Megatron-LM's (arXiv:2104.04473); the generator is from
Salmon et al., SC 2011, doi:10.1145/2063384.2063405.
"""

from typing import Any

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.checks import check_bias, check_floating, check_rows, check_same_device
from parallel_ops._internal.dispatch.registration import promote_to_widest, register
from parallel_ops._internal.dropout import dropout_seed
from parallel_ops._internal.philox import keep_mask, kept_scale


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dropout_p: float,
    *,
    training: bool = True,
    dropout_seed: int | Tensor | None = None,
    index_offset: int = 0,
    row_positions: Tensor | None = None,
    inplace: bool = False,
) -> Tensor:
    """``residual + dropout(x + bias, dropout_p)``, forward and backward fused, no mask stored.

    Args:
        x: ``[..., H]``, float32, float16, bfloat16 or float64, any strides.
        bias: ``[H]``, of any of these dtypes, on the device of ``x``, or ``None``.
        residual: shape and device of ``x``, of any of these dtypes, any strides. ``None``: nothing is added, so that
            without ``bias`` too this is a dropout that stores no mask.
        dropout_p: probability of dropping an element, from 0 to 1. Kept elements are scaled by ``1 / (1 - dropout_p)``.
        training: ``False`` turns dropout off, as ``dropout_p = 0`` does.
        dropout_seed: the seed of the mask: any 64-bit integer, or one int64 element on the device of ``x`` (nothing is
            read back to the host). ``None`` draws a seed from PyTorch's default generator of that device, so
            ``torch.manual_seed``, activation checkpointing and CUDA graphs treat it like ``F.dropout``.
        index_offset: the index, in the whole tensor, of this tensor's first element. At least 0.
        row_positions: int64 ``[s]`` for ``x`` of ``[s, ..., H]``, on its device: the index of each ``x[t]`` in the
            whole tensor ``[S, ..., H]``; for rows that are not adjacent there. ``None``: 0 to s - 1. Values are not
            checked.
        inplace: writes over ``x`` and returns it, for evaluation: no input may require a gradient, and ``x`` must
            be contiguous and of the result's dtype. ``torch.compile``, which plans memory itself, may copy.

    Returns:
        ``[..., H]``, contiguous, of the wider dtype of ``x`` and ``residual``, as PyTorch's ``+`` would give:
        a residual stream in float32 stays so. Under autocast the widest dtype given.

    Raises:
        TypeError: unsupported dtypes, ``dropout_p``, ``dropout_seed``, ``index_offset`` or ``row_positions`` of a wrong
            type. ValueError: wrong shape or device, ``dropout_p`` outside 0 to 1, ``dropout_seed`` beyond 64 bits,
            negative ``index_offset``, ``row_positions`` of another length, ``inplace`` for tensors that do not allow
            it.

    Sharding: elementwise over rows. A shard that is contiguous in the whole tensor, such as rank r's rows under
    sequence parallelism, gives that shard of y when every rank passes the same ``dropout_seed`` and
    ``index_offset = r * x.numel()``. Any other rows need ``row_positions``. The gradient of bias is
    then partial over these ranks.

    Examples:
        >>> import torch
        >>> from parallel_ops import bias_dropout_add
        >>> x, bias, residual = torch.randn(16, 2, 64), torch.randn(64), torch.randn(16, 2, 64)
        >>> y = bias_dropout_add(x, bias, residual, dropout_p=0.1)  # residual + F.dropout(x + bias, 0.1)
        >>> evaluated = bias_dropout_add(x, bias, residual, dropout_p=0.1, training=False)
        >>> torch.allclose(evaluated, residual + x + bias, atol=1e-6)
        True
    """
    check_rows("bias_dropout_add", x)
    check_bias("bias_dropout_add", bias, x)
    dtype = x.dtype
    if residual is not None:
        check_floating("bias_dropout_add", "residual", residual)
        check_same_device("bias_dropout_add", "residual", residual, "x", x)
        if residual.shape != x.shape:
            raise ValueError(
                f"bias_dropout_add: residual must have the shape of x, {list(x.shape)}, got {list(residual.shape)}"
            )
        dtype = torch.promote_types(dtype, residual.dtype)
    if inplace:
        _check_writable(x, bias, residual, dtype)
    if row_positions is not None:
        _check_positions(x, row_positions)
    drawn = _seed(x, dropout_p, training, dropout_seed, index_offset)
    p = 0.0 if drawn is None else dropout_p
    row_positions = None if drawn is None or row_positions is None else row_positions.contiguous()
    if inplace and not torch.compiler.is_compiling():
        _inplace(x, bias, residual, p, drawn, index_offset, row_positions)
        return x
    y = _forward(x, bias, residual, dtype, p, drawn, index_offset, row_positions)
    return x.copy_(y) if inplace else y


def bias_dropout_add_reference(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dropout_p: float,
    *,
    training: bool = True,
    dropout_seed: int | Tensor | None = None,
    index_offset: int = 0,
    row_positions: Tensor | None = None,
) -> Tensor:
    """The same in plain PyTorch, mask included."""
    z = x if bias is None else x + bias
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    drawn = _seed(x, dropout_p, training, dropout_seed, index_offset)
    if drawn is not None:
        kept = keep_mask(x.shape, dropout_p, drawn, index_offset, row_positions)
        z = torch.where(kept, z * kept_scale(dropout_p), 0.0)
    return (z if residual is None else residual + z).to(dtype)


def _check_writable(x: Tensor, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype) -> None:
    given = [t for t in (x, bias, residual) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        raise ValueError("bias_dropout_add: inplace is for evaluation, but x, bias or residual requires a gradient")
    if x.dtype is not dtype or not x.is_contiguous():
        raise ValueError(f"bias_dropout_add: inplace needs a contiguous x of {dtype}, the wider of x and residual")


def _check_positions(x: Tensor, row_positions: Tensor) -> None:
    if not isinstance(row_positions, Tensor) or row_positions.dtype is not torch.int64:
        got = row_positions.dtype if isinstance(row_positions, Tensor) else type(row_positions).__name__
        raise TypeError(f"bias_dropout_add: row_positions must be an int64 tensor or None, got {got}")
    check_same_device("bias_dropout_add", "row_positions", row_positions, "x", x)
    if x.dim() < 2 or row_positions.shape != x.shape[:1]:
        raise ValueError(
            f"bias_dropout_add: row_positions must have one element for each x[t] of x {list(x.shape)}, got "
            f"{list(row_positions.shape)}"
        )


def _seed(x: Tensor, p: float, training: bool, seed: int | Tensor | None, index_offset: int) -> Tensor | None:
    if not isinstance(index_offset, (int, torch.SymInt)) or isinstance(index_offset, bool):
        raise TypeError(f"bias_dropout_add: index_offset must be an int, got {type(index_offset).__name__}")
    if index_offset < 0:
        raise ValueError(f"bias_dropout_add: index_offset must be at least 0, got {index_offset}")
    return dropout_seed("bias_dropout_add", "dropout_p", p, seed, "x", x, training=training)


def outputs(x: Tensor, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def backward_outputs(
    grad: Tensor, dtype: torch.dtype, bias_dtype: torch.dtype | None, p: float, seed: Tensor | None, *_: object
) -> tuple[Tensor, Tensor]:
    dx = grad.new_empty(0 if seed is None else grad.shape, dtype=dtype)
    return dx, grad.new_empty(0) if bias_dtype is None else grad.new_empty(grad.shape[-1], dtype=bias_dtype)


def launch(
    y: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype, p: float,
    seed: Tensor | None, index_offset: int, row_positions: Tensor | None,
) -> None:  # fmt: skip
    from parallel_ops.triton_kernels import bias_dropout_add as kernels

    kernels.forward(x, bias, residual, y, p=p, seed=seed, index_offset=index_offset, row_positions=row_positions)


def launch_inplace(x: Tensor, bias: Tensor | None, residual: Tensor | None, *drawn: Any) -> None:
    launch(x, x, bias, residual, x.dtype, *drawn)


def launch_backward(
    gradients: tuple[Tensor, Tensor], grad: Tensor, dtype: torch.dtype, bias_dtype: torch.dtype | None, p: float,
    seed: Tensor | None, index_offset: int, row_positions: Tensor | None,
) -> None:  # fmt: skip
    from parallel_ops.triton_kernels import bias_dropout_add as kernels

    kernels.backward(grad, *gradients, p=p, seed=seed, index_offset=index_offset, row_positions=row_positions)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, _, _, ctx.p, seed, ctx.index_offset, row_positions = inputs
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(seed, row_positions)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Autograd itself casts gradients to the dtypes of their tensors."""
    seed, row_positions = ctx.saved_tensors
    for_x, for_bias, for_residual = ctx.needs_input_grad[:3]
    dx, dbias = (grad if for_x else None), None
    if for_bias or (for_x and seed is not None):
        dtype, bias_dtype = ctx.dtypes
        scaled, dbias = _backward(
            grad, dtype, bias_dtype if for_bias else None, ctx.p, seed, ctx.index_offset, row_positions
        )
        dx = dx if seed is None else scaled
    return dx, dbias if for_bias else None, grad if for_residual else None, None, None, None, None, None


def _autocast(dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, bias, residual, _, *drawn = promote_to_widest(dtype, args)
    return x, bias, residual, x.dtype, *drawn


_backward = register("bias_dropout_add_backward", outputs=backward_outputs, launch=launch_backward)
_inplace = register("bias_dropout_add_", cuda=launch_inplace)
_forward = register(
    "bias_dropout_add",
    outputs=outputs,
    launch=launch,
    setup_context=setup_context,
    backward=backward,
    autocast=_autocast,
    reference=lambda x, bias, residual, dtype, p, seed, index_offset, row_positions: bias_dropout_add_reference(
        x, bias, residual, p, dropout_seed=seed, index_offset=index_offset, row_positions=row_positions
    ),
)
