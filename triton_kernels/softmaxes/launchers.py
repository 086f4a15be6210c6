"""The kernels behind both softmaxes: whole rows on chip where they fit, else two walks over each row.

Rows of up to ``MAX_ROW`` bytes are loaded once, in chunks that stay in registers, several short rows to a program.
Longer ones are walked twice, first for maximum and sum (online: one exp per element, rescaling the sums when the
maximum grows; Milakov and Gimelshein, arXiv:1805.02867), then to write.

Masks come as broadcast strides, never expanded. With CAUSAL, chunks that no query of a program sees cost a store of
zeros.

A sink is one more logit of every row of a head, whose probability is in no output.
"""

from torch import Tensor

from parallel_ops.triton_kernels._common import as_rows, cdiv, next_power_of_2, unit_of
from parallel_ops.triton_kernels._launch import launch
from parallel_ops.triton_kernels.softmaxes.backward import _backward_kernel, _backward_loop_kernel
from parallel_ops.triton_kernels.softmaxes.forward import _forward_kernel, _forward_loop_kernel

# The longest row kept on chip, in bytes: 64 registers a thread at 16 warps.
MAX_ROW = 128 * 1024
# The longest row that is kept in fp32 once it is loaded, in elements, and the longest beside a mask: longer ones wait
# as they came, and the mask, needed again for each use of them, has no place beside them.
MAX_WIDE = 16384
# Elements of a chunk that a warp takes: one 16-byte load of bf16 a thread; and chunks of a row of up to MAX_WIDE
# elements, by CAUSAL: more where they may be left out.
WARP_CHUNK = 256
MAX_CHUNKS = {False: 4, True: 8}
# Columns under which a row is one chunk, and elements that a program of wider rows takes at least.
MIN_CHUNKED = 512
MIN_TILE = 4096
# Elements in 32 bytes of bf16, the smallest piece that memory moves; of fp32, in two.
ALIGN = 16
# Columns per step beyond MAX_ROW, and warps: 16 elements a thread beside as many running sums.
LOOP_BLOCK = 4096
LOOP_WARPS = 8
# Where such rows are short enough, one program an SM finds them in the L2 cache the second time: 132 rows of
# 65,536 in bf16 and their masks are 25 MB, of an H100's 50. 32 warps with more than 32 registers a thread.
CACHED_BLOCK = 16384
CACHED_WARPS = 32

# Runs of leading dimensions over which a mask's rows are evenly spaced; [b, 1, sq, sk] over [b, np, sq, sk] has three.
MAX_RUNS = 3


def tile(cols: int, causal: bool) -> dict[str, int]:
    """Rows and columns of a chunk, chunks of a row, and warps, for rows that fit on chip."""
    padded = max(8, next_power_of_2(cols))
    if padded < MIN_CHUNKED:
        return {"BLOCK_ROWS": 4 * WARP_CHUNK // padded, "BLOCK_COLS": padded, "CHUNKS": 1, "num_warps": 4}
    chunks = MAX_CHUNKS[causal]
    num_warps = min(16, max(MIN_TILE // (chunks * WARP_CHUNK), padded // (chunks * WARP_CHUNK)))
    block_cols = min(padded // chunks, num_warps * WARP_CHUNK)
    if padded > MAX_WIDE:
        block_cols = num_warps * WARP_CHUNK
    return {
        "BLOCK_ROWS": num_warps * WARP_CHUNK // block_cols,
        "BLOCK_COLS": block_cols,
        "CHUNKS": cdiv(cols, block_cols),
        "num_warps": num_warps,
    }


def mask_runs(mask: Tensor, scores: Tensor) -> list[tuple[int, int]]:
    """The leading dimensions of ``scores`` as (size, stride in the mask), stride 0 where broadcast, merged if even."""
    missing = scores.dim() - mask.dim()
    runs: list[tuple[int, int]] = []
    for dim, size in enumerate(scores.shape[:-1]):
        if size == 1:
            continue
        stride = 0 if dim < missing or mask.shape[dim - missing] == 1 else mask.stride(dim - missing)
        if runs and runs[-1][1] == stride * size:
            runs[-1] = runs[-1][0] * size, stride
        else:
            runs.append((size, stride))
    return runs


def forward(
    scores: Tensor, mask: Tensor | None, sink: Tensor | None, y: Tensor, share: Tensor, *, scale: float,
    causal: bool = False, window: int | None = None,
) -> None:  # fmt: skip
    """``y = softmax(scale * scores)`` over the last dimension under ``mask``, zero elsewhere; ``y`` is contiguous.

    Args:
        causal, window: instead of a mask, each query sees the keys up to its own, at most ``window`` of them.
        sink: one element or one for each head, the last dimension but two; ``share`` gets each row's probability of it.
    """
    if scores.numel() == 0:
        return
    runs = [] if mask is None else mask_runs(mask, scores)
    if mask is not None and len(runs) > MAX_RUNS:
        # Six dimensions or more, broadcast in turns: one launch for each index of the first.
        whole = mask.dim() < scores.dim() or mask.shape[0] == 1
        part = mask if mask.dim() < scores.dim() else mask[0]
        shares = share.view(scores.shape[0], -1) if sink is not None else [share] * scores.shape[0]
        for i in range(scores.shape[0]):
            forward(scores[i], part if whole else mask[i], sink, y[i], shares[i], scale=scale)
        return
    (_, stride_0), (size_1, stride_1), (size_2, stride_2) = [(1, 0)] * (MAX_RUNS - len(runs)) + runs
    kind, col_stride = "none", 0
    if mask is not None:
        kind = "additive" if mask.is_floating_point() else "bool"
        col_stride = 0 if mask.dim() == 0 or mask.shape[-1] == 1 else mask.stride(-1)
    scores, rows, cols, stride = as_rows(scores)
    queries, heads, window = _sizes(y, sink, causal, window)
    layout = (size_1, size_2, stride_0, stride_1, stride_2, col_stride)
    args = (scores, mask, sink, y, share, rows, cols, stride, scale, *layout, queries, heads, window)
    units = {"UNIT": unit_of(cols, stride), "MASK_UNIT": unit_of(stride_0, stride_1, stride_2)}
    flags = {**units, "MASK": kind, "CAUSAL": causal, "FAST": y.dtype.itemsize == 2}
    if cols * y.dtype.itemsize > MAX_ROW or (kind != "none" and cols > MAX_WIDE):
        fits = cols * y.dtype.itemsize <= MAX_ROW
        block, warps = (CACHED_BLOCK, CACHED_WARPS) if fits else (LOOP_BLOCK, LOOP_WARPS)
        launch(_forward_loop_kernel, (rows,), *args, **flags, ALIGN=ALIGN, BLOCK_COLS=block, num_warps=warps)
        return
    config = tile(cols, causal)
    grid = (cdiv(rows, config["BLOCK_ROWS"]),)
    launch(_forward_kernel, grid, *args, **flags, ALIGN=ALIGN, WIDE=cols > MAX_WIDE, **config)


def backward(
    grad: Tensor, y: Tensor, share: Tensor | None, dx: Tensor, sink_grad: Tensor | None, *, scale: float,
    causal: bool = False, window: int | None = None,
) -> None:  # fmt: skip
    """``dx = scale * y * (grad - mean)``, and each row's gradient of its sink; ``dx`` is contiguous."""
    if y.numel() == 0:
        return
    grad, rows, cols, grad_stride = as_rows(grad)
    y, _, _, y_stride = as_rows(y)
    queries, _, window = _sizes(dx, None, causal, window)
    args = (grad, y, share, dx, sink_grad, rows, cols, grad_stride, y_stride, scale, queries, window)
    flags = {"UNIT": unit_of(cols, grad_stride, y_stride), "CAUSAL": causal, "ALIGN": ALIGN}
    if 2 * cols * y.dtype.itemsize > MAX_ROW:
        launch(_backward_loop_kernel, (rows,), *args, **flags, BLOCK_COLS=LOOP_BLOCK, num_warps=LOOP_WARPS)
        return
    config = tile(cols, causal)
    launch(_backward_kernel, (cdiv(rows, config["BLOCK_ROWS"]),), *args, **flags, **config)


def _sizes(t: Tensor, sink: Tensor | None, causal: bool, window: int | None) -> tuple[int, int, int | None]:
    """Queries per matrix, heads, and the window where it is shorter than rows."""
    if not causal and sink is None:
        return 1, 1, None
    heads = 1 if sink is None else sink.numel()
    return t.shape[-2], heads, None if window is None or window >= t.shape[-1] else window
