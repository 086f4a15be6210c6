"""Sums over the rows of a gradient, finished in the launch that makes their parts: one launch a backward.

The programs that make parts are the first ones of a grid, the workers. Each stores its parts, passes a barrier and
adds one to a counter. The programs behind them, the finishers, wait until the counter has all workers and add the
parts of a few columns each, in an order that the shape alone sets: the same bits on every run. As SMs take
programs in the order of their numbers, no finisher holds a place that a worker waits for (scans of CUB rest on the
same order), and they start where the first workers have ended. One program that added all parts of a column block
would read them at the speed of one multiprocessor: 4 MB take it as long as the op itself.

The last finisher to pass sets the counter back to zero for the next launch. Launches on one stream, which run one after
the other, share a counter. A captured launch has its own: its graph may run beside other work of any stream.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel_ops.triton_kernels._common import COMPILED, cdiv
from parallel_ops.triton_kernels._launch import temporary
from parallel_ops.triton_kernels.memory import lasting

# 32-bit numbers from one counter to the next: 32 bytes, a sector. The first counts workers, the second finishers.
_STRIDE = 8
# Counters for launches that graphs capture, a MiB of 32 bytes each: made before, as what a graph clears itself would be
# a launch more each time it runs. A captured launch beyond them clears its own.
_RESERVED = 32768

_by_stream: dict[tuple[int, int], Tensor] = {}
_reserves: dict[int, tuple[Tensor, list[int]]] = {}


def counter(device: torch.device) -> Tensor:
    """Two numbers that are zero before and after each launch on the current stream of ``device``."""
    return temporary(functools.partial(_counter, device))


def _counter(device: torch.device) -> Tensor:
    if device.type != "cuda":
        return torch.zeros(2, dtype=torch.int32, device=device)
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        return _reserved(device)
    stream = torch._C._cuda_getCurrentRawStream(index)
    found = _by_stream.get((index, stream))
    if found is None:
        if index not in _reserves:
            _reserves[index] = _lasting_zeros(_RESERVED * _STRIDE, device), [0]
        found = _by_stream[index, stream] = _lasting_zeros(2, device)
    return found


def _lasting_zeros(count: int, device: torch.device) -> Tensor:
    return lasting(device, lambda: torch.zeros(count, dtype=torch.int32, device=device))


def _reserved(device: torch.device) -> Tensor:
    """For one captured launch alone. Never given back: graphs do not say when they end."""
    reserve = _reserves.get(device.index)
    if reserve is None or reserve[1][0] == _RESERVED:
        return torch.zeros(2, dtype=torch.int32, device=device)
    numbers, used = reserve
    first = used[0] * _STRIDE
    used[0] += 1
    return numbers[first : first + 2]


def finish_cols(cols: int) -> int:
    """Columns of a finisher, of ``cols`` in all sums: few, so that finishers are on most SMs, each once."""
    return 16 if cols < 4096 else 32 if cols <= 16384 else 128


def finishers(cols: int, sums: int = 1) -> int:
    """Programs that finish ``sums`` sums of ``cols`` columns each."""
    return sums * cdiv(cols, finish_cols(sums * cols))


def finish_block(cols: int, num_warps: int, sums: int = 1) -> dict[str, int]:
    """The parts and the columns that a finisher adds at a time: 32 numbers a thread."""
    block_cols = finish_cols(sums * cols)
    return {"FINISH_SPLITS": 1024 * num_warps // block_cols, "FINISH_COLS": block_cols}


@triton.jit
def arrive(counter_ptr):
    """Lets finishers read what this program stored."""
    tl.debug_barrier()  # what all threads stored; one of them counts
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def wait_for_workers(counter_ptr, workers):
    """Until ``workers`` programs arrived. The last of the finishers, all other programs, sets the counter back."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < workers:
        if COMPILED:
            tl.inline_asm_elementwise(
                "nanosleep.u32 20; mov.b32 $0, $1;", "=r,r", [workers], dtype=tl.int32, is_pure=False, pack=1
            )
    if tl.atomic_add(counter_ptr + 1, 1, sem="acq_rel") == tl.num_programs(0) - workers - 1:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed")
        tl.atomic_xchg(counter_ptr + 1, 0, sem="relaxed")


@triton.jit
def sum_columns(
    partial_ptr, out_ptr, block, splits, cols, FINISH_SPLITS: tl.constexpr, FINISH_COLS: tl.constexpr
):  # fmt: skip
    """``out[j] = sum_i partial[i, j]`` of the columns of one block."""
    col = block * FINISH_COLS + tl.arange(0, FINISH_COLS)[None, :]
    sums = tl.zeros((FINISH_SPLITS, FINISH_COLS), dtype=partial_ptr.dtype.element_ty)
    for first in range(0, splits, FINISH_SPLITS):
        split = first + tl.arange(0, FINISH_SPLITS)[:, None]
        mask = (split < splits) & (col < cols)
        sums += tl.load(partial_ptr + split.to(tl.int64) * cols + col, mask=mask, other=0.0)
    total = tl.sum(sums, axis=0, keep_dims=True)
    tl.store(out_ptr + col, total.to(out_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def finish_both(
    partial_dweight_ptr, partial_dbias_ptr, dweight_ptr, dbias_ptr, counter_ptr, splits, workers, cols,
    FINISH_SPLITS: tl.constexpr, FINISH_COLS: tl.constexpr,
):  # fmt: skip
    """Some columns of a weight's gradient; behind those of all, of a bias's. At least one of the two is there."""
    wait_for_workers(counter_ptr, workers)
    block = tl.program_id(0) - workers
    if dweight_ptr is None:
        sum_columns(partial_dbias_ptr, dbias_ptr, block, splits, cols, FINISH_SPLITS, FINISH_COLS)
    elif dbias_ptr is None:
        sum_columns(partial_dweight_ptr, dweight_ptr, block, splits, cols, FINISH_SPLITS, FINISH_COLS)
    else:
        blocks = tl.cdiv(cols, FINISH_COLS)
        if block < blocks:
            sum_columns(partial_dweight_ptr, dweight_ptr, block, splits, cols, FINISH_SPLITS, FINISH_COLS)
        else:
            sum_columns(partial_dbias_ptr, dbias_ptr, block - blocks, splits, cols, FINISH_SPLITS, FINISH_COLS)
