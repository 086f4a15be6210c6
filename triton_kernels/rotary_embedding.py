"""rotary_embedding: one program rotates a block of one token's heads; the backward is the same with sin negated.

The angles are read once for all heads of the block. Halves are two loads of adjacent columns each; interleaved pairs
are one load that is split in registers. The rotated width is a compile-time constant (a model has one): as an argument,
a width like 80 would hide from the compiler that 8 columns lie on one side of the mask, and break loads of 128 bits
into loads of 16.
"""

import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import cdiv, next_power_of_2, to_acc
from parallel_ops.triton_kernels._launch import launch

# Elements of a block: 16 a thread at 4 warps. A token of 32 heads of 128 takes two programs; a multiprocessor holds 16
# of them, which is 64 KiB on the way in.
BLOCK = 2048
MAX_WARPS = 4


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, positions_ptr, y_ptr, batch, heads, angles,
    x_stride_s, x_stride_b, x_stride_h, x_stride_d, cos_stride, cos_stride_d, sin_stride, sin_stride_d,
    positions_stride_s, positions_stride_b,
    HAS_POSITIONS: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, DIMS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(heads, BLOCK_HEADS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    s = token // batch
    b = token % batch
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + s * positions_stride_s + b * positions_stride_b).to(tl.int64)
    else:
        position = s
    x_ptr += s * x_stride_s + b * x_stride_b + head.to(tl.int64) * x_stride_h
    y_ptr += (token * heads + head) * DIMS

    # Angles that are not there become NaN: nothing out of bounds is read, and the mistake is seen.
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    known = (pair < HALF) & (position >= 0) & (position < angles)
    cos = to_acc(tl.load(cos_ptr + position * cos_stride + pair * cos_stride_d, mask=known, other=float("nan")))
    sin = to_acc(tl.load(sin_ptr + position * sin_stride + pair * sin_stride_d, mask=known, other=float("nan")))
    if INVERSE:
        sin = -sin
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        mask = (head < heads) & (both < 2 * HALF)
        x = to_acc(tl.load(x_ptr + both * x_stride_d, mask=mask, other=0.0))
        x1, x2 = tl.split(tl.reshape(x, (BLOCK_HEADS, BLOCK_HALF, 2)))
        y = tl.reshape(tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin), (BLOCK_HEADS, 2 * BLOCK_HALF))
        tl.store(y_ptr + both, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        mask = (head < heads) & (pair < HALF)
        x1 = to_acc(tl.load(x_ptr + pair * x_stride_d, mask=mask, other=0.0))
        x2 = to_acc(tl.load(x_ptr + (pair + HALF) * x_stride_d, mask=mask, other=0.0))
        tl.store(y_ptr + pair, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptr + pair + HALF, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty), mask=mask)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        mask = (head < heads) & (rest < DIMS)
        tl.store(y_ptr + rest, tl.load(x_ptr + rest * x_stride_d, mask=mask), mask=mask)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, y: Tensor, *, interleaved: bool, inverse: bool
) -> None:
    """``y``, contiguous, from ``x`` of ``[s, b, h, d]`` or ``[t, h, d]`` with any strides."""
    if x.numel() == 0:
        return
    packed = x.dim() == 3
    s, b, h, d = (x.shape[0], 1, *x.shape[1:]) if packed else x.shape
    stride_s, stride_b, stride_h, stride_d = (x.stride(0), 0, *x.stride()[1:]) if packed else x.stride()
    p_stride_s, p_stride_b = (0, 0) if positions is None else (*positions.stride(), 0)[:2]
    half = cos.shape[1]
    block_half = next_power_of_2(max(half, 1))
    block_rest = next_power_of_2(d - 2 * half) if d > 2 * half else 0
    block_heads = max(1, min(next_power_of_2(h), BLOCK // next_power_of_2(d)))
    # As many warps as move half of each pair in 16 bytes a thread: few for tokens of few heads or partial rotation.
    num_warps = max(1, min(MAX_WARPS, block_heads * block_half * x.dtype.itemsize // 512))
    launch(
        _rotate_kernel, (s * b * cdiv(h, block_heads),),
        x, cos, sin, positions, y, b, h, cos.shape[0],
        stride_s, stride_b, stride_h, stride_d, *cos.stride(), *sin.stride(), p_stride_s, p_stride_b,
        HAS_POSITIONS=positions is not None, INTERLEAVED=interleaved, INVERSE=inverse, DIMS=d, HALF=half,
        BLOCK_HEADS=block_heads, BLOCK_HALF=block_half, BLOCK_REST=block_rest,
        num_warps=num_warps,
    )  # fmt: skip
