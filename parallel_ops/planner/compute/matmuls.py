"""The time of a matmul on a GPU.

An m x n matmul with inner dimension k is cut into tiles, which the SMs run in waves; the last wave takes
as long as a full one. A tile of a x b takes 2 a b (k + RAMP) FLOPs at its share of a multiprocessor's rate; RAMP is for
filling the pipeline and writing the tile. The best tile and split of k are taken. The time is at least that of reading
and writing the matrices, plus a launch.

Sources: NVIDIA, Matrix multiplication background user's guide, "tile quantization" and "wave quantization"; the sizes
of tiles are those of cuBLAS and CUTLASS.
"""

import math
from functools import lru_cache
from typing import NamedTuple

# Rows, columns, and rate relative to the largest tile: smaller tiles read more per FLOP.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.5))
_SPLITS = (1, 2, 4)
# RAMP in units of k; GAP: seconds between two kernels of a full queue. Assumed.
RAMP = 64
GAP = 3e-6
# If a row is not a multiple of 16 bytes, tensor cores run at less than half of their rate (NVIDIA, same guide, "tensor
# core requirements").
_ALIGNMENT = 16
_UNALIGNED = 0.4


class Engine(NamedTuple):
    """Reached FLOP/s and bytes/s, and SMs (0: matmuls are not quantised)."""

    flops: float
    bandwidth: float
    multiprocessors: int


def product(
    engine: Engine, m: float, n: float, k: float, *, count: float = 1, width: float = 2, rows_of_k: bool = True
) -> float:
    """Seconds of ``count`` matmuls of [m, k] and [k, n] with elements of ``width`` bytes, in one launch.
    ``rows_of_k``: the first matrix has k elements in a row; else it is stored transposed."""
    if min(m, n, k, count) <= 0:
        return 0.0
    if not engine.multiprocessors:
        seconds = 2 * count * m * n * k / engine.flops
    else:
        each, slots = engine.flops / engine.multiprocessors, engine.multiprocessors
        best = math.inf
        for rows, columns, share in _TILES:
            tiles = count * math.ceil(m / rows) * math.ceil(n / columns)
            for split in _SPLITS:
                waves = math.ceil(tiles * split / slots)
                best = min(best, waves * rows * columns * (k / split + RAMP) / share)
        seconds = 2 * best / each
        if any(size * width % _ALIGNMENT for size in ((n, k) if rows_of_k else (n,))):
            seconds /= _UNALIGNED
    moved = count * (m * n + m * k + k * n) * width
    return max(seconds, moved / engine.bandwidth) + GAP


@lru_cache(maxsize=65536)
def linear(
    engine: Engine, tokens: float, inputs: float, outputs: float, *, count: float = 1, width: float = 2
) -> tuple[float, float, float]:
    """Seconds of output, input gradient and weight gradient of ``count`` linear layers with ``tokens`` rows each."""
    return (
        product(engine, tokens, outputs, inputs, count=count, width=width),
        product(engine, tokens, inputs, outputs, count=count, width=width),
        product(engine, outputs, inputs, tokens, count=count, width=width, rows_of_k=False),
    )
