"""Tile sizes of the attention kernels: fixed by kernel, head dimension, dtype and GPU, so that the first step is as
fast as the second and every one has the same order of sums.

Chosen by the compiled code, no GPU having run it: the largest tiles that spill nothing. What limits them are 255
registers a thread: the accumulators of dK and dV alone take 128 of them at 128 keys x 128 dims and eight warps. wgmma
and tcgen05 want 64 rows of own tokens for four warps, for which dK and dV of 256 dims have no place under dropout on an
H100. Copies of one tile ahead; more would not fit shared memory beside 256 dims. The philox words of dropout need
registers beside all that, and so does a soft cap on an A100.
"""

from typing import NamedTuple

import torch

from parallel_ops.triton_kernels._common import capability, next_power_of_2


class Tile(NamedTuple):
    queries: int
    keys: int
    warps: int = 8
    stages: int = 2


class Tiles(NamedTuple):
    forward: Tile
    keys: Tile  # dK and dV
    queries: Tile  # dQ


# By architecture and padded head dimension, for data of 16 bits.
_PLAIN = {
    (80, 64): Tiles(Tile(128, 64), Tile(32, 128), Tile(128, 64)),
    (80, 128): Tiles(Tile(128, 64), Tile(64, 64), Tile(128, 32)),
    (80, 256): Tiles(Tile(64, 32), Tile(32, 32), Tile(64, 32, stages=1)),
    (90, 64): Tiles(Tile(128, 128), Tile(64, 128), Tile(128, 64)),
    (90, 128): Tiles(Tile(128, 128), Tile(32, 128), Tile(128, 64)),
    (90, 256): Tiles(Tile(128, 64), Tile(16, 64), Tile(128, 32)),
    (100, 64): Tiles(Tile(128, 128), Tile(64, 128), Tile(128, 64)),
    (100, 128): Tiles(Tile(128, 128), Tile(32, 64), Tile(128, 64)),
    (100, 256): Tiles(Tile(128, 64), Tile(32, 32), Tile(64, 32)),
}
_NARROW = {
    (80, 64): Tiles(Tile(128, 64), Tile(16, 64), Tile(128, 32)),
    (80, 128): Tiles(Tile(128, 32), Tile(32, 64), Tile(128, 32)),
    (80, 256): Tiles(Tile(64, 32), Tile(32, 32), Tile(64, 32, stages=1)),
    (90, 64): Tiles(Tile(128, 64), Tile(32, 128), Tile(128, 64)),
    (90, 128): Tiles(Tile(128, 64), Tile(16, 128), Tile(128, 32)),
    (90, 256): Tiles(Tile(128, 32), Tile(32, 32), Tile(128, 16)),
    (100, 64): Tiles(Tile(128, 64), Tile(32, 128), Tile(128, 64)),
    (100, 128): Tiles(Tile(128, 64), Tile(16, 64), Tile(128, 32)),
    (100, 256): Tiles(Tile(128, 32), Tile(32, 32), Tile(64, 32)),
}
# Products of fp32 as three of tf32 hold each operand twice. From 128 dims on some of that is spilled at any size tried.
_FP32 = {
    64: Tiles(Tile(64, 32, warps=4), Tile(32, 64), Tile(64, 32, warps=4)),
    128: Tiles(Tile(32, 32, stages=1), Tile(32, 32), Tile(32, 32, stages=1)),
    256: Tiles(Tile(16, 16, warps=4, stages=1), Tile(16, 16, warps=4, stages=1), Tile(16, 16, warps=4, stages=1)),
}


def tiles(dims: int, dtype: torch.dtype, device: torch.device, *, softcap: bool, dropout: bool) -> Tiles:
    """``dims``: 1 to 256, the larger of those of q and of v."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"flash_attention: there is no kernel for {dtype}; use float32, float16 or bfloat16")
    if dims > 256:
        raise ValueError(f"flash_attention: heads have {dims} dimensions; the kernels take at most 256")
    padded = max(64, next_power_of_2(dims))
    if dtype is torch.float32:
        return _FP32[padded]
    found = capability(device)
    # The others have the instructions of an A100, and some no more than 99 KiB of shared memory, which its tiles fit.
    architecture = found if found in (90, 100) else 100 if found == 103 else 80
    narrow = dropout or (softcap and architecture == 80)
    return (_NARROW if narrow else _PLAIN)[architecture, padded]
