"""The time of a matrix product on a GPU.

C of m x n from inner dimension k is cut into tiles, which the multiprocessors take in waves; the last wave takes as
long as a full one. A tile of a x b takes 2 a b (k + RAMP) FLOPs at its share of a multiprocessor's rate, where RAMP
stands for filling the pipeline and writing the tile. The product takes the best tile and split of k, but no less than
the memory needs for A, B and C, and a launch.

Sources: NVIDIA, Matrix multiplication background user's guide, "tile quantization" and "wave quantization"; the sizes
of tiles are those of cuBLAS and CUTLASS.
"""

import math
from typing import NamedTuple

# Rows, columns, and the share of the rate of the largest tile: smaller ones read more for each FLOP.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.5))
_SPLITS = (1, 2, 4)
# In units of k, and seconds between the kernels of a full queue. Assumed.
RAMP = 64
GAP = 3e-6
# Where a row is not a whole number of 16-byte words, tensor cores are fed at less than half of their rate (NVIDIA, same
# guide, "tensor core requirements").
_ALIGNMENT = 16
_UNALIGNED = 0.4


class Engine(NamedTuple):
    """What runs products: FLOP/s and bytes/s that are reached, multiprocessors (0: products are not quantised)."""

    flops: float
    bandwidth: float
    multiprocessors: int


def product(engine: Engine, m: float, n: float, k: float, *, count: float = 1, width: int = 2) -> float:
    """Seconds of ``count`` products of [m, k] and [k, n] with elements of ``width`` bytes, in one launch."""
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
        if any(size * width % _ALIGNMENT for size in (n, k)):
            seconds /= _UNALIGNED
    moved = count * (m * n + m * k + k * n) * width
    return max(seconds, moved / engine.bandwidth) + GAP


def linear(
    engine: Engine, tokens: float, inputs: float, outputs: float, *, count: float = 1, width: int = 2
) -> tuple[float, float, float]:
    """Seconds of the output, the gradient of the input and the gradient of the weights of ``count`` linear layers, each
    with ``tokens`` rows."""
    return (
        product(engine, tokens, outputs, inputs, count=count, width=width),
        product(engine, tokens, inputs, outputs, count=count, width=width),
        product(engine, outputs, inputs, tokens, count=count, width=width),
    )
