"""Number and order of the programs of the attention kernels, and the strides and sizes that all launches take.

A program keeps a block of queries or of keys, and takes as long as the walk along what the block sees: under a causal
mask some take many times as long as others. With all registers of an SM it runs there alone. So a grid fills
a GPU if there are some programs for each SM and the longest go first: then all end at about the same time.
`benchmarks/gpu_model/attention.py` schedules the grids of given shapes.
"""

import torch
from torch import Tensor

from parallel_ops.triton_kernels._common import cdiv, multiprocessors, next_power_of_2, unit_of

# A head's keys and values are read by each of its blocks, and from the L2 cache if they are still there: it has 40 MB
# on an A100, 50 on an H100, 60 on an H200. What else passes through takes some of it.
_SECTION_BYTES = 32 << 20


def section_of(pairs: int, bytes_of_a_head: int, sharing: int = 1) -> int:
    """Number of pairs of a head and a batch that run at a time: as many as have their tensors in the L2 cache.

    Args:
        bytes_of_a_head: what the programs of a pair read. sharing: adjacent pairs that read the same.
    """
    most = max(1, _SECTION_BYTES // max(1, bytes_of_a_head)) * sharing
    return cdiv(pairs, cdiv(pairs, most)) if pairs > most else max(1, pairs)


def group_splits(programs: int, group: int, device: torch.device) -> int:
    """Parts of a group of query heads that programs of dK and dV share: the fewest that fill the GPU.

    ``programs``: with one part. Sums of parts are added in their order by another kernel, so results depend on the
    number of SMs, and are the same on the same model of GPU. At three and a half programs an SM
    the schedule of a causal mask is 94 % full or more; twice as many would double the fp32 sums written and read.
    """
    for splits in range(1, group):
        if group % splits == 0 and 2 * programs * splits >= 7 * multiprocessors(device):
            return splits
    return group


# Of a tile; offsets within it are of 32 bits up to strides of 2^22.
MOST_TOKENS = 512


def strides_of(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(t.stride(axis) for t in tensors for axis in (0, 1, 2))


def hints_of(strides: tuple[int, ...]) -> dict[str, int | bool]:
    """A divisor of all strides, and whether offsets within a tile take more than 32 bits."""
    return {"UNIT": unit_of(*strides), "WIDE": max(strides) * MOST_TOKENS >= 2**31}


def dims_of(q: Tensor, v: Tensor) -> dict[str, int]:
    """Elements of a row of q and k, and of v and the output; padded, for matmuls of at least 16."""
    dims, dims_v = q.shape[3], v.shape[3]
    return {
        "DIMS": dims, "BLOCK_DIMS": max(16, next_power_of_2(dims)),
        "DIMS_V": dims_v, "BLOCK_DIMS_V": max(16, next_power_of_2(dims_v)),
    }  # fmt: skip
