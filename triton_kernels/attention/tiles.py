"""Tile sizes of the attention kernels: fixed by kernel, head dimension, dtype, options and GPU, so that the first step
is as fast as the second and every one has the same order of sums.

Chosen by the compiled code, no GPU having run it: the largest tiles that spill nothing. What limits them are 255
registers a thread: the accumulators of dK and dV alone take 128 of them at 128 keys x 128 dims and eight warps. wgmma
and tcgen05 want 64 rows of own tokens for four warps, for which dK and dV of 256 dims have no place on an H100 under
dropout, a cap or documents. The philox words of dropout need registers beside all that.

Three stages, where shared memory has room for them: with two, the copies of the next tile start behind the matmuls of
this one, and the loop waits for them at once. With one, a tile is loaded and stored, so that programs hide each other's
loads alone: dQ on sm_100, where Triton puts no proxy fence between copies that arrive in a loop and the matmuls that
read them. ``tests/kernels/attention/test_machine_code.py`` looks at the compiled code for all of that.
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

    def ahead(self) -> "Tiles":
        """With three stages where there are two: matmuls of a tile beside the copies of the next one."""
        return Tiles(*(t._replace(stages=3) if t.stages == 2 else t for t in self))


# By architecture and padded head dimension, for data of 16 bits.
_PLAIN = {
    (80, 64): Tiles(Tile(128, 64), Tile(32, 128), Tile(128, 64)),
    (80, 128): Tiles(Tile(128, 64), Tile(64, 64), Tile(128, 32)),
    (80, 256): Tiles(Tile(64, 32), Tile(32, 32), Tile(64, 32, stages=1)),
    (90, 64): Tiles(Tile(128, 128), Tile(64, 128), Tile(128, 64)).ahead(),
    (90, 128): Tiles(Tile(128, 128), Tile(32, 128), Tile(128, 64)).ahead(),
    (90, 256): Tiles(Tile(128, 32), Tile(16, 64), Tile(128, 32)).ahead(),
    (100, 64): Tiles(Tile(128, 128), Tile(64, 128), Tile(128, 64, stages=1)).ahead(),
    (100, 128): Tiles(Tile(128, 64), Tile(32, 64), Tile(128, 64, stages=1)).ahead(),
    (100, 256): Tiles(Tile(128, 32, stages=3), Tile(32, 32), Tile(128, 32, stages=1)),
}
_NARROW = {
    (80, 64): Tiles(Tile(128, 64), Tile(16, 64), Tile(128, 32)),
    (80, 128): Tiles(Tile(128, 32), Tile(32, 32), Tile(64, 32)),
    (80, 256): Tiles(Tile(64, 32), Tile(16, 32), Tile(64, 32, stages=1)),
    (90, 64): Tiles(Tile(128, 64), Tile(32, 128), Tile(128, 64)).ahead(),
    (90, 128): Tiles(Tile(128, 64), Tile(16, 128), Tile(128, 32)).ahead(),
    (90, 256): Tiles(Tile(128, 32), Tile(32, 32), Tile(128, 16)).ahead(),
    (100, 64): Tiles(Tile(128, 64), Tile(32, 128), Tile(128, 64, stages=1)).ahead(),
    (100, 128): Tiles(Tile(128, 64), Tile(16, 64), Tile(128, 64, stages=1)).ahead(),
    (100, 256): Tiles(Tile(128, 32), Tile(32, 32), Tile(64, 32, stages=1)),
}
# Matmuls of fp32 as three of tf32 hold each operand twice. Beyond 128 dims some of that is spilled at any size tried.
_FP32 = {
    64: Tiles(Tile(64, 32, warps=4), Tile(32, 32), Tile(64, 32, warps=4)),
    128: Tiles(Tile(16, 32), Tile(32, 16, stages=1), Tile(16, 32)),
    256: Tiles(Tile(16, 32, stages=1), Tile(16, 16, stages=1), Tile(16, 16, stages=1)),
}
_FP32_NARROW = {
    64: Tiles(Tile(64, 32, warps=4), Tile(32, 16, stages=1), Tile(32, 32)),
    128: Tiles(Tile(16, 32, stages=1), Tile(16, 16, stages=1), Tile(16, 32, stages=1)),
    256: _FP32[256],
}

# Merged into what earlier blocks gave, whose tile takes as many registers as this one's, at 256 dims; and under a cap
# and dropout together.
_MERGED = {90: (Tile(32, 32), Tile(64, 16, stages=3)), 100: (Tile(64, 64, stages=3), Tile(64, 32, stages=1))}
_LEAST_KEYS = {(100, 128): Tile(32, 32, stages=3)}
# For GEMMs of 64 dims that wgmma does not take: registers hold their operands.
_FP32_FORWARD, _FP32_QUERIES = Tile(32, 32, stages=1), Tile(32, 32)


def tiles(
    dims: int, dtype: torch.dtype, device: torch.device, *, softcap: bool, dropout: bool, spans: bool = False,
    merge: bool = False,
) -> Tiles:  # fmt: skip
    """``dims``: 1 to 256, the larger of those of q and of v."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"flash_attention: there is no kernel for {dtype}; use float32, float16 or bfloat16")
    if dims > 256:
        raise ValueError(f"flash_attention: heads have {dims} dimensions; the kernels take at most 256")
    padded = max(64, next_power_of_2(dims))
    found = capability(device)
    # The others have the instructions of an A100, and some no more than 99 KiB of shared memory, which its tiles fit.
    architecture = found if found in (90, 100) else 100 if found == 103 else 80
    if dtype is torch.float32:
        chosen = (_FP32_NARROW if dropout or softcap else _FP32)[padded]
        if padded == 64 and architecture != 90:
            return chosen._replace(forward=_FP32_FORWARD, queries=_FP32_QUERIES)
        return chosen
    plain, narrow = _PLAIN[architecture, padded], _NARROW[architecture, padded]
    # Beside the registers of dK and dV there are few for a cap's slopes or for the runs of documents.
    tight = (softcap and architecture == 100) or ((softcap or spans) and (architecture, padded) == (90, 256))
    if dropout or (softcap and architecture == 80):
        plain = narrow._replace(keys=_LEAST_KEYS.get((architecture, padded), narrow.keys)) if softcap else narrow
    elif tight:
        plain = plain._replace(keys=narrow.keys)
    if merge and padded == 256 and architecture in _MERGED:
        forward, queries = _MERGED[architecture]
        return plain._replace(forward=forward, queries=queries)
    return plain
