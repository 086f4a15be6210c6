"""rotary_embedding: one program rotates a block of one token's heads, of q or of k; the backward is the same with sin
negated.

The angles are read once for all heads of the block. Halves are two loads of adjacent columns each; interleaved pairs
are one load that is split in registers. The rotated width is a compile-time constant (a model has one): as an argument,
a width like 80 would hide from the compiler that 8 columns lie on one side of the mask, and break loads of 128 bits
into loads of 16. Outputs may be the inputs: then all threads of a program have read before any writes.
"""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import aligned, cdiv, next_power_of_2, tile_of, to_acc, unit_of
from parallel_ops.triton_kernels._launch import launch, remembered

# Elements of a block: 16 a thread at 4 warps. A token of 32 heads of 128 takes two programs; an SM holds 16
# of them, which is 64 KiB on the way in.
BLOCK = 2048
MAX_WARPS = 4


@triton.jit
def _rotated(x1, x2, cos, sin):
    """The pair turned by its angle. Left to the compiler, which product is rounded would depend on the layout."""
    return tl.fma(x1, cos, -(x2 * sin)), tl.fma(x2, cos, x1 * sin)


@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, head, heads, cos, sin, x_stride_d, y_stride_d,
    INPLACE: tl.constexpr, INTERLEAVED: tl.constexpr, DIMS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """``x_ptr`` and ``y_ptr`` are where each head starts, ``[BLOCK_HEADS, 1]``."""
    x_stride_d, y_stride_d = tl.cast(x_stride_d, tl.int64), tl.cast(y_stride_d, tl.int64)
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    rest = 2 * HALF + tl.arange(0, BLOCK_REST if BLOCK_REST > 0 else 1)[None, :]
    in_rest = (head < heads) & (rest < DIMS)
    if BLOCK_REST > 0:
        passed = tl.load(x_ptr + rest * x_stride_d, mask=in_rest)
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        mask = (head < heads) & (both < 2 * HALF)
        x = to_acc(tl.load(x_ptr + both * x_stride_d, mask=mask, other=0.0))
        x1, x2 = tl.split(tl.reshape(x, (BLOCK_HEADS, BLOCK_HALF, 2)))
        if INPLACE:
            tl.debug_barrier()
        y1, y2 = _rotated(x1, x2, cos, sin)
        y = tl.reshape(tl.join(y1, y2), (BLOCK_HEADS, 2 * BLOCK_HALF))
        tl.store(y_ptr + both * y_stride_d, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        mask = (head < heads) & (pair < HALF)
        x1 = to_acc(tl.load(x_ptr + pair * x_stride_d, mask=mask, other=0.0))
        x2 = to_acc(tl.load(x_ptr + (pair + HALF) * x_stride_d, mask=mask, other=0.0))
        if INPLACE:
            tl.debug_barrier()
        y1, y2 = _rotated(x1, x2, cos, sin)
        tl.store(y_ptr + pair * y_stride_d, y1.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptr + (pair + HALF) * y_stride_d, y2.to(y_ptr.dtype.element_ty), mask=mask)
    if BLOCK_REST > 0:
        tl.store(y_ptr + rest * y_stride_d, passed, mask=in_rest)


@triton.jit
def _position_in_sequence(cu_seqlens_ptr, sequences, token):
    """``token`` minus the start of its sequence: the last of the ``sequences`` starts that is not after it."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_ptr + middle).to(tl.int64) <= token:
            low = middle
        else:
            high = middle
    return token - tl.load(cu_seqlens_ptr + low).to(tl.int64)


@triton.jit
def _rotate_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, cu_seqlens_ptr, to_q_ptr, to_k_ptr,
    batch, q_heads, k_heads, q_blocks, blocks, angles, sequences,
    q_stride_s, q_stride_b, q_stride_h, q_stride_d, k_stride_s, k_stride_b, k_stride_h, k_stride_d,
    to_q_stride_s, to_q_stride_b, to_q_stride_h, to_q_stride_d, to_k_stride_s, to_k_stride_b, to_k_stride_h,
    to_k_stride_d, cos_stride, cos_stride_b, cos_stride_d, sin_stride, sin_stride_b, sin_stride_d,
    positions_stride_s, positions_stride_b,
    HAS_K: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_SEQUENCES: tl.constexpr, INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr, INPLACE: tl.constexpr, DIMS: tl.constexpr, HALF: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    token, block = tile_of(tl.program_id(0), blocks)
    token = token.to(tl.int64)
    s = token // batch
    b = token % batch
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + s * positions_stride_s + b * positions_stride_b).to(tl.int64)
    elif HAS_SEQUENCES:
        position = _position_in_sequence(cu_seqlens_ptr, sequences, token)
    else:
        position = s

    # Angles that are not there become NaN: nothing out of bounds is read, and the mistake is seen.
    pair = tl.arange(0, BLOCK_HALF)[None, :].to(tl.int64)
    known = (pair < HALF) & (position >= 0) & (position < angles)
    cos_ptr += position * cos_stride + b * cos_stride_b
    sin_ptr += position * sin_stride + b * sin_stride_b
    cos = to_acc(tl.load(cos_ptr + pair * cos_stride_d, mask=known, other=float("nan")))
    sin = to_acc(tl.load(sin_ptr + pair * sin_stride_d, mask=known, other=float("nan")))
    if INVERSE:
        sin = -sin
    if HAS_K and block >= q_blocks:
        head = (block - q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None].to(tl.int64)
        x = k_ptr + s * aligned(k_stride_s, UNIT) + b * aligned(k_stride_b, UNIT) + head * aligned(k_stride_h, UNIT)
        y = (
            to_k_ptr + s * aligned(to_k_stride_s, UNIT) + b * aligned(to_k_stride_b, UNIT)
            + head * aligned(to_k_stride_h, UNIT)
        )  # fmt: skip
        _rotate_heads(
            x, y, head, k_heads, cos, sin, k_stride_d, to_k_stride_d,
            INPLACE, INTERLEAVED, DIMS, HALF, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None].to(tl.int64)
        x = q_ptr + s * aligned(q_stride_s, UNIT) + b * aligned(q_stride_b, UNIT) + head * aligned(q_stride_h, UNIT)
        y = (
            to_q_ptr + s * aligned(to_q_stride_s, UNIT) + b * aligned(to_q_stride_b, UNIT)
            + head * aligned(to_q_stride_h, UNIT)
        )  # fmt: skip
        _rotate_heads(
            x, y, head, q_heads, cos, sin, q_stride_d, to_q_stride_d,
            INPLACE, INTERLEAVED, DIMS, HALF, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


def rotate(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None,
    to_q: Tensor, to_k: Tensor | None, *, interleaved: bool, inverse: bool,
) -> None:  # fmt: skip
    """``to_q`` and ``to_k`` from ``q`` and ``k``, which they may be: ``[s, b, h, d]`` or ``[t, h, d]``, any strides.

    ``cos`` and ``sin``: ``[positions, R / 2]``, or one row for each token, ``[s, b, R / 2]``.
    """
    _rotate(
        q, k, cos, sin, positions, cu_seqlens, to_q, to_k,
        interleaved=interleaved, inverse=inverse, inplace=to_q is q,
    )  # fmt: skip


@remembered
def _rotate(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None,
    to_q: Tensor, to_k: Tensor | None, *, interleaved: bool, inverse: bool, inplace: bool,
) -> None:  # fmt: skip
    if q.numel() == 0 and (k is None or k.numel() == 0):
        return
    s, b, q_heads, d = q.shape if q.dim() == 4 else (q.shape[0], 1, *q.shape[1:])
    k_heads = 0 if k is None else k.shape[-2]
    strides = [stride for t in (q, k, to_q, to_k) for stride in _strides(t)]
    half = cos.shape[-1]
    block_half = next_power_of_2(max(half, 1))
    block_rest = next_power_of_2(d - 2 * half) if d > 2 * half else 0
    block_heads = max(1, min(next_power_of_2(max(q_heads, k_heads)), BLOCK // next_power_of_2(d)))
    q_blocks, k_blocks = cdiv(q_heads, block_heads), cdiv(k_heads, block_heads)
    # As many warps as move half of each pair in 16 bytes a thread: few for tokens of few heads or partial rotation.
    num_warps = max(1, min(MAX_WARPS, block_heads * block_half * q.dtype.itemsize // 512))
    angle_strides = [(t.stride(0), 0 if t.dim() == 2 else t.stride(1), t.stride(-1)) for t in (cos, sin)]
    launch(
        _rotate_kernel, (s * b * (q_blocks + k_blocks),),
        q, k, cos, sin, positions, None if cu_seqlens is None else cu_seqlens.contiguous(), to_q, to_k,
        b, q_heads, k_heads, q_blocks, q_blocks + k_blocks, cos.shape[0],
        0 if cu_seqlens is None else cu_seqlens.shape[0] - 1, *strides, *angle_strides[0], *angle_strides[1],
        *((0, 0) if positions is None else (*positions.stride(), 0)[:2]),
        HAS_K=k is not None, HAS_POSITIONS=positions is not None, HAS_SEQUENCES=cu_seqlens is not None,
        INTERLEAVED=interleaved, INVERSE=inverse, INPLACE=inplace, DIMS=d, HALF=half,
        UNIT=unit_of(*(stride for i, stride in enumerate(strides) if i % 4 < 3)),
        BLOCK_HEADS=block_heads, BLOCK_HALF=block_half, BLOCK_REST=block_rest, num_warps=num_warps,
    )  # fmt: skip


def _strides(t: Tensor | None) -> tuple[int, ...]:
    """Those of ``[s, b, h, d]``."""
    if t is None:
        return 0, 0, 0, 0
    return t.stride() if t.dim() == 4 else (t.stride(0), 0, *t.stride()[1:])
