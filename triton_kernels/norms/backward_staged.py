"""Backward of norms over rows whose sums of columns fill the registers; in Gluon.

Triton keeps x and the incoming gradient in registers from their first use to their second, where such sums leave no
room for them. Here they wait in shared memory, to which they are copied anyway, and each thread reads its part twice.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from parallel_ops.triton_kernels._common import COMPILED, aligned, cdiv, quotient, to_acc
from parallel_ops.triton_kernels._finish import arrive, wait_for_workers
from parallel_ops.triton_kernels._launch import launch
from parallel_ops.triton_kernels.norms.forward import scaled

WARPS = 8
# Elements of a chunk: 8 a thread, one copy of 16 bytes.
CHUNK = 2048
# Of a row: two sums of 64 registers a thread. In shared memory two rows of x and of the gradient, one of the sum's, and
# what goes from warp to warp: an A100 has 163 KiB, GPUs for other uses have 99.
CHUNKS = 8
SHARED_BYTES = 5 * CHUNKS * CHUNK * 2 + 64
# Parts that a thread reads at a time when it sums a column.
FINISH_SPLITS = gl.constexpr(32)


@gluon.jit
def _add_both(a, b, other_a, other_b):
    return a + other_a, b + other_b


@gluon.jit
def _copy_row(place, ptr, start, cols, LAYOUT: gl.constexpr):
    """Starts to copy a row; what is beyond ``cols`` becomes zero."""
    col = gl.arange(0, place.shape[0], LAYOUT)
    async_copy.async_copy_global_to_shared(place, ptr + start + col, mask=col < cols)


@gluon.jit
def _chunk(row, chunk: gl.constexpr, CHUNK: gl.constexpr, LAYOUT: gl.constexpr):
    return to_acc(row.slice(chunk * CHUNK, CHUNK).load(LAYOUT))


@gluon.jit
def _centred(x, mean, mean_ptr):
    """Without a mean, RMSNorm."""
    if mean_ptr is not None:
        x -= mean
    return x


@gluon.jit
def _mean_of(mean_ptr, row, rows):
    if mean_ptr is None:
        return 0.0
    else:
        return gl.load(mean_ptr + row, mask=row < rows, other=0.0)


@gluon.jit
def _sum_columns(partial_dweight_ptr, partial_dbias_ptr, dweight_ptr, dbias_ptr, block, splits, cols):
    """Some columns of the weight's gradient; behind those of all, of the bias's."""
    if dweight_ptr is None:
        _sum_block(partial_dbias_ptr, dbias_ptr, block, splits, cols)
    elif dbias_ptr is None:
        _sum_block(partial_dweight_ptr, dweight_ptr, block, splits, cols)
    else:
        blocks = (cols + 32 * gl.num_warps() - 1) // (32 * gl.num_warps())
        if block < blocks:
            _sum_block(partial_dweight_ptr, dweight_ptr, block, splits, cols)
        else:
            _sum_block(partial_dbias_ptr, dbias_ptr, block - blocks, splits, cols)


@gluon.jit
def _sum_block(partial_ptr, out_ptr, block, splits, cols):
    """A column a thread."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    COLS: gl.constexpr = 32 * gl.num_warps()
    col = block * COLS + gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))[None, :]
    number = gl.arange(0, FINISH_SPLITS, gl.SliceLayout(1, LAYOUT))[:, None]
    sums = gl.zeros([FINISH_SPLITS, COLS], gl.float32, LAYOUT)
    for first in range(0, splits, FINISH_SPLITS):
        mask = (first + number < splits) & (col < cols)
        sums += gl.load(partial_ptr + (first + number).to(gl.int64) * cols + col, mask=mask, other=0.0)
    total = gl.sum(sums, 0)
    col = block * COLS + gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
    gl.store(out_ptr + col, total.to(out_ptr.dtype.element_ty), mask=col < cols)


@gluon.jit
def _staged_backward_kernel(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_dweight_ptr, partial_dbias_ptr,
    dweight_ptr, dbias_ptr, counter_ptr, workers, rows, cols, grad_stride, grad_sum_stride, x_stride,
    UNIT: gl.constexpr, ZERO_CENTERED: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    cols, grad_stride = aligned(cols, UNIT), aligned(grad_stride, UNIT)
    grad_sum_stride, x_stride = aligned(grad_sum_stride, UNIT), aligned(x_stride, UNIT)
    # Every thread reads what it copied itself.
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    split = gl.program_id(0)
    if counter_ptr is not None:
        if split >= workers:
            wait_for_workers(counter_ptr, workers)
            _sum_columns(
                partial_dweight_ptr, partial_dbias_ptr, dweight_ptr, dbias_ptr, split - workers, workers, cols
            )  # fmt: skip
            return
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    grads = gl.allocate_shared_memory(grad_ptr.dtype.element_ty, [2, CHUNKS * CHUNK], SHARED)
    xs = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [2, CHUNKS * CHUNK], SHARED)
    if grad_sum_ptr is not None:
        grad_sum_row = gl.allocate_shared_memory(grad_sum_ptr.dtype.element_ty, [CHUNKS * CHUNK], SHARED)
    _copy_row(grads.index(0), grad_ptr, split.to(gl.int64) * grad_stride, cols, LAYOUT)
    _copy_row(xs.index(0), x_ptr, split.to(gl.int64) * x_stride, cols, LAYOUT)
    async_copy.commit_group()
    mean, rstd = _mean_of(mean_ptr, split, rows), gl.load(rstd_ptr + split)
    dweight = ()
    dbias = ()
    weights = ()
    for chunk in gl.static_range(CHUNKS):
        col = chunk * CHUNK + gl.arange(0, CHUNK, LAYOUT)
        dweight += (gl.zeros([CHUNK], gl.float32, LAYOUT),)
        dbias += (gl.zeros([CHUNK], gl.float32, LAYOUT),)
        if weight_ptr is not None:
            weights += (gl.load(weight_ptr + col, mask=col < cols, other=0.0),)
    here = 0
    for row in range(split, rows, workers):
        if grad_sum_ptr is not None:
            _copy_row(grad_sum_row, grad_sum_ptr, row.to(gl.int64) * grad_sum_stride, cols, LAYOUT)
            async_copy.commit_group()
        following = row.to(gl.int64) + workers
        if following < rows:
            _copy_row(grads.index(1 - here), grad_ptr, following * grad_stride, cols, LAYOUT)
            _copy_row(xs.index(1 - here), x_ptr, following * x_stride, cols, LAYOUT)
        async_copy.commit_group()
        following_mean = _mean_of(mean_ptr, following, rows)
        following_rstd = gl.load(rstd_ptr + following, mask=following < rows, other=0.0)
        grad_row, x_row = grads.index(here), xs.index(here)
        async_copy.wait_group(1 if grad_sum_ptr is None else 2)

        dots = gl.zeros([CHUNK], gl.float32, LAYOUT)
        totals = gl.zeros([CHUNK], gl.float32, LAYOUT)
        new_dweight = ()
        new_dbias = ()
        for chunk in gl.static_range(CHUNKS):
            col = chunk * CHUNK + gl.arange(0, CHUNK, LAYOUT)
            kept = weights[chunk] if weight_ptr is not None else None
            by_weight, by_bias = dweight[chunk], dbias[chunk]
            # Beside what it saves, the branch keeps the compiler from working on so many chunks at once that it spills.
            if chunk * CHUNK < cols:
                grad, x = _chunk(grad_row, chunk, CHUNK, LAYOUT), _chunk(x_row, chunk, CHUNK, LAYOUT)
                g = scaled(grad, kept, weight_ptr, col, col < cols, ZERO_CENTERED)
                xhat = _centred(x, mean, mean_ptr) * rstd
                totals += g
                dots = gl.fma(g, xhat, dots)
                by_weight = gl.fma(grad, xhat, by_weight)
                by_bias += grad
            new_dweight += (by_weight,)
            new_dbias += (by_bias,)
        dweight = new_dweight
        dbias = new_dbias
        # dx = rstd (g - mean(g) - xhat mean(g xhat)), with the factors of a row gathered; in RMSNorm without mean(g).
        if mean_ptr is None:
            dot, shift = gl.sum(dots, 0), 0.0
        else:
            dot, total = gl.reduce((dots, totals), 0, _add_both)
            shift = rstd * quotient(total, cols)
        slope = rstd * quotient(dot, cols) * rstd

        if grad_sum_ptr is not None:
            async_copy.wait_group(1)
        for chunk in gl.static_range(CHUNKS):
            col = chunk * CHUNK + gl.arange(0, CHUNK, LAYOUT)
            kept = weights[chunk] if weight_ptr is not None else None
            if chunk * CHUNK < cols:
                grad, x = _chunk(grad_row, chunk, CHUNK, LAYOUT), _chunk(x_row, chunk, CHUNK, LAYOUT)
                g = scaled(grad, kept, weight_ptr, col, col < cols, ZERO_CENTERED)
                dx = g * rstd - (_centred(x, mean, mean_ptr) * slope + shift)
                if grad_sum_ptr is not None:
                    dx += _chunk(grad_sum_row, chunk, CHUNK, LAYOUT)
                gl.store(dx_ptr + row.to(gl.int64) * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=col < cols)
        mean, rstd, here = following_mean, following_rstd, 1 - here
    for chunk in gl.static_range(CHUNKS):
        col = chunk * CHUNK + gl.arange(0, CHUNK, LAYOUT)
        offset = split.to(gl.int64) * cols + col
        if dweight_ptr is not None:
            gl.store(partial_dweight_ptr + offset, dweight[chunk], mask=col < cols)
        if dbias_ptr is not None:
            gl.store(partial_dbias_ptr + offset, dbias[chunk], mask=col < cols)
    if counter_ptr is not None:
        arrive(counter_ptr)


@functools.cache
def _has_room(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return bool(torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= SHARED_BYTES)


def fits(cols: int, unit: int, x: Tensor, *others: Tensor | None) -> bool:
    """Can rows of these tensors be copied, 16 bytes at a time, and stay?"""
    alike = all(t is None or (t.dtype.itemsize == 2 and t.data_ptr() % 16 == 0) for t in (x, *others))
    return bool(COMPILED) and alike and unit >= 8 and cols <= CHUNKS * CHUNK and _has_room(x.device)


def staged_backward(workers: int, sums: int, cols: int, *args: Tensor | int | None, **flags: int) -> None:
    """``workers`` programs, each with a part of ``sums`` gradients of parameters: one fits an SM."""
    programs = workers + sums * cdiv(cols, 32 * WARPS)
    launch(_staged_backward_kernel, (programs,), *args, **flags, CHUNK=CHUNK, CHUNKS=CHUNKS, num_warps=WARPS)
