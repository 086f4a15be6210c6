"""Rotary position embedding.

    (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin)           for each pair (x1, x2) of a head's first R dimensions
    y        = x                                            for the others
    dx       = the same of dy, with sin negated

Pair i of R/2 is (x[i], x[R/2 + i]), "half-rotated", as in GPT-NeoX, Llama and Megatron-LM; or (x[2i], x[2i+1]),
"interleaved", as in the paper and GPT-J. Its angle at position p is given by cos[p, i] and sin[p, i], which are used in
fp32 whatever the dtype of x: rounded to bf16, as composites have them, they are off by up to 0.2%.

q and k share their tokens' angles, so one call rotates both. Saved for backward: cos, sin and the positions; x is not
needed. Source: Su et al., arXiv:2104.09864.
"""

from typing import Any

import torch
from torch import Tensor

from parallel_ops._internal.dispatch.autograd import once_differentiable
from parallel_ops._internal.dispatch.checks import check_floating
from parallel_ops._internal.dispatch.registration import register
from parallel_ops._internal.tensor_format import TensorFormat, check_format, described, from_sbhd, to_sbhd
from parallel_ops.ops.rotary_arguments import check_rotary, check_writable, sequence_first, tables_of


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor | None = None,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    doubled: bool = False,
    tensor_format: TensorFormat = "sbhd",
    inplace: bool = False,
) -> Tensor:
    """``x`` with the first dimensions of each head rotated by its position's angles.

    Args:
        x: ``[s, b, h, d]``, or as ``tensor_format`` says, or packed ``[t, h, d]``, float32, float16, bfloat16 or
            float64, any strides: a view of a fused qkv is read as it is.
        cos, sin: ``[positions, R / 2]``, R <= d even, or one row for each token, ``[s, b, R / 2]`` (``[b, s, R / 2]``
            if the batch is first); float32 or the dtype of ``x``. They take no gradient. Without ``sin``, ``cos`` holds
            the angles themselves, of any of these dtypes, also as ``[s, 1, 1, R / 2]``: with ``doubled`` Megatron-LM's
            freqs. Their cosine and sine are computed in fp32 at every call; compute tables once if several layers share
            them.
        interleaved: which dimensions make a pair (see the top of this file).
        positions: int64, ``[s]``, ``[s, b]`` (``[b, s]`` if the batch is first) or, for packed ``x``, ``[t]``: the row
            of ``cos`` and ``sin`` for each token. ``None``: row i for index i of the sequence. Context-parallel ranks
            need them. One out of range raises on CPU; on CUDA, where checking would wait for the GPU, it gives NaN.
        cu_seqlens: int32 or int64 ``[n + 1]``, for packed ``x`` in place of positions: where each of its n sequences
            starts, and t. Positions count from the start of a sequence.
        doubled: ``cos`` and ``sin`` have R columns, each angle twice, as Megatron-LM's and Transformers' do.
        tensor_format: order of the dimensions of ``x`` and the result: ``"sbhd"``, ``"bhsd"`` (Transformers' and
            SDPA's) or ``"bshd"`` (FlashAttention's).
        inplace: writes over ``x``, which must not be expanded, and returns it. ``torch.compile``, which plans memory
            itself, may copy.

    Returns:
        Shape and dtype of ``x``, contiguous unless in place; for ``"bshd"`` a view of ``[s, b, h, d]``.

    Raises:
        TypeError: unsupported dtypes. ValueError: wrong shapes or devices, positions out of range (CPU), angles that
            require a gradient.

    Sharding: every token and head is independent, so x may be sharded on any dimension but the last, and y is sharded
    alike; positions are those of the tokens that the rank holds, cos and sin are replicated.

    Examples:
        >>> import torch
        >>> from parallel_ops import rotary_embedding
        >>> x = torch.randn(128, 2, 8, 64)  # [s, b, heads, d]
        >>> angles = torch.arange(128)[:, None] * 10_000.0 ** (-torch.arange(32) / 32)
        >>> rotary_embedding(x, angles.cos(), angles.sin()).shape
        torch.Size([128, 2, 8, 64])
    """
    return _run(
        "rotary_embedding", x, None, cos, sin, interleaved, positions, cu_seqlens, doubled, tensor_format, inplace
    )[0]


def rotary_embedding_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor | None = None,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    doubled: bool = False,
    tensor_format: TensorFormat = "sbhd",
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """``rotary_embedding`` of ``q`` and ``k`` in one call; their numbers of heads may differ.

    Examples:
        >>> import torch
        >>> from parallel_ops import rotary_embedding_qk
        >>> q, k = torch.randn(128, 2, 8, 64), torch.randn(128, 2, 4, 64)  # [s, b, heads, d]
        >>> angles = torch.arange(128)[:, None] * 10_000.0 ** (-torch.arange(32) / 32)
        >>> q, k = rotary_embedding_qk(q, k, angles.cos(), angles.sin())
        >>> k.shape
        torch.Size([128, 2, 4, 64])
    """
    return _run(
        "rotary_embedding_qk", q, k, cos, sin, interleaved, positions, cu_seqlens, doubled, tensor_format, inplace
    )


def rotary_embedding_reference(
    x: Tensor,
    cos: Tensor,
    sin: Tensor | None = None,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The same in plain PyTorch, as Megatron-LM and Transformers have it: angles in the dtype of x."""
    if sin is None:
        cos, sin = cos.cos(), cos.sin()
    if cu_seqlens is not None:
        token = torch.arange(x.shape[0], device=x.device)
        positions = token - cu_seqlens[torch.searchsorted(cu_seqlens, token, right=True) - 1]
    if cos.dim() == 3:
        cos, sin = (t.to(x.dtype).unsqueeze(2) for t in (cos, sin))
    else:
        rows = torch.arange(x.shape[0], device=x.device) if positions is None else positions
        tokens = (*rows.shape, *(1 for _ in range(x.dim() - 1 - rows.dim())))
        cos, sin = (t[rows].to(x.dtype).view(*tokens, t.shape[-1]) for t in (cos, sin))
    rotated, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    if interleaved:
        cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
        turned = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), dim=-1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        x1, x2 = rotated.chunk(2, dim=-1)
        turned = torch.cat((-x2, x1), dim=-1)
    return torch.cat((rotated * cos + turned * sin, rest), dim=-1)


def _run(
    op: str, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor | None, interleaved: bool,
    positions: Tensor | None, cu_seqlens: Tensor | None, doubled: bool, tensor_format: TensorFormat, inplace: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_format(op, tensor_format)
    batch_first, heads_first = tensor_format != "sbhd", tensor_format == "bhsd"
    names = ("x",) if k is None else ("q", "k")
    for name, t in zip(names, (q, k), strict=False):
        assert t is not None
        check_floating(op, name, t)
        if t.dim() != 4 and (batch_first or t.dim() != 3):
            packed = "" if batch_first else " or packed [t, h, d]"
            raise ValueError(f"{op}: {name} must be {described(tensor_format)}{packed}, got {list(t.shape)}")
    cos, sin = tables_of(op, cos, sin, interleaved, doubled, q.dtype)
    if batch_first:
        q, k = to_sbhd(q, tensor_format), None if k is None else to_sbhd(k, tensor_format)
        cos, sin, positions = (sequence_first(t, dims) for t, dims in ((cos, 3), (sin, 3), (positions, 2)))
    check_rotary(op, names, q, k, cos, sin, positions, cu_seqlens, tensor_format)
    if inplace:
        check_writable(op, names, q, k)
    arguments = (cos, sin, positions, cu_seqlens, interleaved)
    if inplace and not torch.compiler.is_compiling():
        q, k = _rotate_inplace(q, k, *arguments)
    else:
        rotated_q, rotated_k = _forward(q, k, *arguments, heads_first)
        if inplace:
            q.copy_(rotated_q)
            if k is not None:
                k.copy_(rotated_k)
        else:
            q, k = rotated_q, rotated_k
    if batch_first:
        q, k = from_sbhd(q, tensor_format), k if k is None or k.dim() < 4 else from_sbhd(k, tensor_format)
    return q, q if k is None else k


def _output(x: Tensor, heads_first: bool) -> Tensor:
    if not heads_first:
        return x.new_empty(x.shape)
    s, b, h, d = x.shape
    return x.new_empty((b, h, s, d)).permute(2, 0, 1, 3)


def outputs(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None,
    interleaved: bool, heads_first: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _output(q, heads_first), q.new_empty(0) if k is None else _output(k, heads_first)


def launch(
    out: tuple[Tensor, Tensor], q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None,
    cu_seqlens: Tensor | None, interleaved: bool, heads_first: bool, *, inverse: bool = False,
) -> None:  # fmt: skip
    from parallel_ops.triton_kernels import rotary_embedding as kernels

    to_q, to_k = out
    kernels.rotate(
        q, k, cos, sin, positions, cu_seqlens, to_q, None if k is None else to_k,
        interleaved=interleaved, inverse=inverse,
    )  # fmt: skip


def launch_backward(out: tuple[Tensor, Tensor], *arguments: Any) -> None:
    launch(out, *arguments, inverse=True)


def launch_inplace(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None,
    interleaved: bool,
) -> None:  # fmt: skip
    from parallel_ops.triton_kernels import rotary_embedding as kernels

    kernels.rotate(
        q, k, cos, sin, positions, cu_seqlens, q, k, interleaved=interleaved, inverse=False
    )  # fmt: skip


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, k, *angles, ctx.interleaved, ctx.heads_first = inputs
    if k is None:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*angles)


def _gradients(ctx: Any, grad_q: Tensor | None, grad_k: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of q and k, either of which may be ``None``."""
    one, other = (grad_k, None) if grad_q is None else (grad_q, grad_k)
    if one is None:
        return None, None
    rotated = _backward(one, other, *ctx.saved_tensors, ctx.interleaved, ctx.heads_first)
    return (None, rotated[0]) if grad_q is None else (rotated[0], None if grad_k is None else rotated[1])


def backward(ctx: Any, grad_q: Tensor | None, grad_k: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, grad_q, grad_k), *(None,) * 6


class _Overwritten(torch.autograd.Function):
    """Marks a tensor as rotated in place for autograd. Torch has no formulas for ops that write over arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, interleaved: bool, *angles: Tensor | None) -> Tensor:
        ctx.mark_dirty(x)
        ctx.interleaved, ctx.heads_first = interleaved, False
        ctx.save_for_backward(*angles)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, _ = once_differentiable("rotary_embedding", _gradients)(ctx, grad, None)
        return dx, *(None,) * 5


def _rotate_inplace(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None,
    interleaved: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    angles = (cos, sin, positions, cu_seqlens)
    _inplace(q.detach(), None if k is None else k.detach(), *angles, interleaved)
    # One at a time, since autograd takes no function that writes over several views.
    return _Overwritten.apply(q, interleaved, *angles), None if k is None else _Overwritten.apply(
        k, interleaved, *angles
    )


_backward = register("rotary_embedding_backward", outputs=outputs, launch=launch_backward)
_inplace = register("rotary_embedding_", cuda=launch_inplace)
_forward = register(
    "rotary_embedding",
    outputs=outputs,
    launch=launch,
    setup_context=setup_context,
    backward=backward,
    reference=lambda q, k, cos, sin, positions, cu_seqlens, interleaved, _: tuple(
        rotary_embedding_reference(t, cos, sin, interleaved=interleaved, positions=positions, cu_seqlens=cu_seqlens)
        for t in (q, k)
        if t is not None
    ),
)
