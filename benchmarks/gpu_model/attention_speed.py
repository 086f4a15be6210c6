"""TFLOP/s that the attention kernels should reach: time on the tensor cores beside that of the softmax.

The unmasked loop of the machine code is one tile. Its matmuls take the tensor cores as long as they multiply or, if
that is longer, as their operands take to come from shared memory; its instructions take issue slots, its exponentials
the special function units, its keys and values come from L2. How many tiles an SM works through is what
``attention.py`` schedules.

Two speeds: where nothing of a tile hides beside its matmuls, and where the shorter of both hides wholly. Two groups of
warps, each of which waits for its matmuls before its softmax, are between the two; barriers and waits come on top.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_model import attention, table
from benchmarks.gpu_model.attention import Grid
from benchmarks.gpu_model.devices import CLONE, ISSUE_SLOTS, L2_BYTES, LAUNCH_GAP, SPECIAL_FUNCTIONS, Device
from benchmarks.ops import flash_attention

# Multiply-adds a cycle of a multiprocessor's tensor cores in 16 bits, and TFLOP/s of all as specified for dense
# matmuls: whitepapers of A100 and H100, datasheets of H100, H200 and HGX B200. The clock of matmuls follows.
MULTIPLY_ADDS = {80: 1024, 90: 2048, 100: 4096}
PEAKS = {"A100": 312.0, "H100 PCIe": 756.0, "H100 SXM": 989.4, "H200": 989.4, "B200": 2250.0}
# Bytes a cycle of shared memory: 32 banks of 4 bytes (CUDA C++ Programming Guide).
SHARED_BYTES = 128
# 256 dims, beside the shapes of the grids.
_WIDE: attention.Shape = (1, 8192, 16, 4, 256, None)
# Forward and backward multiply so often; the backward's two kernels make S and dP twice.
_PRODUCTS = {"_forward_kernel": 2, "_keys_kernel": 4, "_queries_kernel": 3}


@dataclass(frozen=True)
class Tile:
    """Cycles of an SM for one tile of scores; ``least``: of matmuls at the peak."""

    least: float
    products: float
    issue: float
    special: float
    l2: float

    @property
    def rest(self) -> float:
        return max(self.issue, self.special, self.l2)

    @property
    def limit(self) -> str:
        """The resource that takes longest."""
        if self.products < self.rest:
            return max(("issue", "special", "l2"), key=lambda name: getattr(self, name)).replace("l2", "L2")
        return "products" if self.products < 1.2 * self.least else "shared memory"


@functools.cache
def tile(launch: Any, capability: int) -> Tile:
    """The tile of a recorded launch."""
    from ptx import aot
    from support.numerics.attention_launches import loops_with_products

    constants, warps = dict(launch.constants), dict(launch.options)["num_warps"]
    loop = loops_with_products(aot.compile_for(launch, capability))[0]
    queries, keys, dims = (constants[name] for name in ("BLOCK_QUERIES", "BLOCK_KEYS", "BLOCK_DIMS"))
    least = _PRODUCTS[launch.name] * queries * keys * dims / MULTIPLY_ADDS[capability]
    products = least
    if capability == 90:
        products = sum(_of_warpgroup(x.name, x.operands) for x in loop) * warps / 4
    if capability == 80 or products == 0:  # fragments of 16 x 16 elements, by whole warps
        products = max(least, sum(512 / SHARED_BYTES for x in loop if x.name.startswith("LDSM")) * warps)
    others = queries if launch.name == "_keys_kernel" else keys
    moved = others * (dims + constants["BLOCK_DIMS_V"]) * 2
    special = sum(x.name.startswith("MUFU") for x in loop) * warps / SPECIAL_FUNCTIONS
    return Tile(least, products, len(loop) * warps / ISSUE_SLOTS, special, moved / L2_BYTES)


def _of_warpgroup(name: str, operands: str) -> float:
    """Cycles of an ``HGMMA.64xNx16``, whose first operand comes from shared memory or from registers."""
    shape = re.match(r"HGMMA\.64x(\d+)x16", name)
    if shape is None:
        return 0.0
    n = int(shape[1])
    from_memory = 32 * n + (32 * 64 if re.match(r"\s*R\d+, gdesc", operands) else 0)
    return max(64 * n * 16 / MULTIPLY_ADDS[90], from_memory / SHARED_BYTES)


@dataclass(frozen=True)
class Speed:
    """TFLOP/s as papers count them: two matmuls of the visible half forward, five backward.

    ``apart``: nothing hides beside matmuls. ``beside``: all that can.
    """

    apart: float
    beside: float
    tiles: Mapping[str, Tile]

    @property
    def limit(self) -> str:
        return " and ".join(dict.fromkeys(t.limit for t in self.tiles.values()))


@functools.cache
def speeds(shape: attention.Shape, device: Device) -> dict[str, Speed]:
    """Forward and backward in bfloat16, causal."""
    batch, tokens, heads, kv_heads, dims, window = shape
    clock = 1e12 * PEAKS[device.name] / (2 * MULTIPLY_ADDS[device.capability] * device.multiprocessors)
    launched = attention.launched_grids(shape, device)
    tiles = {grid.kernel: tile(launch, device.capability) for grid, launch in launched}
    visible = tokens * tokens / 2 if window is None else window * (tokens - (window - 1) / 2)
    work = 4 * batch * heads * dims * visible
    # D reads the output and its gradient; dK and dV of parts of groups are written and read in fp32.
    splits = next(grid.splits for grid, _ in launched if grid.kernel == "_keys_kernel")
    moved = [2 * batch * tokens * heads * dims * 2]
    if splits > 1:
        moved.append(4 * splits * batch * tokens * kv_heads * dims * 4)
    beside_products = sum(n / (CLONE * device.bandwidth) + LAUNCH_GAP for n in moved) + LAUNCH_GAP
    seconds: dict[str, list[float]] = {"forward": [0.0, 0.0], "backward": [beside_products] * 2}
    for grid, _ in launched:
        t, rounds = tiles[grid.kernel], _rounds(grid, device) / clock
        of = seconds["forward" if grid.kernel == "_forward_kernel" else "backward"]
        of[0] += rounds * (t.products + t.rest)
        of[1] += rounds * max(t.products, t.rest)
    found = {}
    for direction, factor in (("forward", 1.0), ("backward", 2.5)):
        apart, beside = (factor * work / s / 1e12 for s in seconds[direction])
        its = {name: t for name, t in tiles.items() if (name == "_forward_kernel") == (direction == "forward")}
        found[direction] = Speed(apart, beside, its)
    return found


def measured(folder: Path) -> dict[tuple[str, str, str], float]:
    """TFLOP/s of the Triton kernels in rows of ``flash_attention``, by shape, direction and GPU."""
    found: dict[tuple[str, str, str], float] = {}
    for row in table.rows_measured(folder):
        device = table.device_of(row.device)
        if (row.op, row.provider) == ("flash_attention", "triton") and row.bytes and device is not None:
            shape = tuple(map(int, row.shape.split("x")))
            b, h, s, d, kv_heads = (*shape, shape[1])[:5]
            work = flash_attention.flops(shape, row.direction)
            found[f"{b}x{s}x{h}x{kv_heads}x{d}", row.direction, device] = work / row.ms_median / 1e9
    return found


def _rounds(grid: Grid, device: Device) -> float:
    """Tiles of the SM that ends last."""
    places, times = device.multiprocessors * grid.resident, grid.times()
    return sum(times) / (attention.busy(times, places) * device.multiprocessors)


def section(devices: Sequence[Device], measured: Mapping[tuple[str, str, str], float]) -> str:
    """The part of the page, in Markdown. ``measured``: TFLOP/s by shape, direction and GPU."""
    named = [d for d in devices if d.name in ("A100", "H100 SXM", "B200")]
    lines = [
        "## What attention should reach",
        "",
        "TFLOP/s of this package's kernels, bfloat16, causal, as papers count them (two products of the visible half",
        "forward, five backward), and what takes a tile longest: products; shared memory (which operands come",
        "from); issue, special, L2 as above. The first number holds if nothing of a tile hides beside its products,",
        "the second if the shorter of both hides wholly; waits and barriers are in neither, so measured speeds can be",
        'below the first. `backend="auto"` takes cuDNN\'s kernels for such calls where they are there.',
        "",
        "Published for an H100 SXM at 128 dims: FlashAttention-2 370, cuDNN 595, FlashAttention-3 648, forward, not",
        "causal at 16,384 tokens (Shah et al., arXiv:2407.08608); FlashAttention-3 causal, 4 x 8192 x 48 heads: 685,",
        "backward 539 (tritonbench, 2026-09). An earlier version with two stages and other grids had on an H100 455",
        "and 284 at 1x8192x32x8x128, 280 and 230 at 1x8192x32x32x64 ([performance.md](performance.md)): 57 to 81% of",
        "the first number.",
        "",
        "| shape | direction | " + " | ".join(d.name for d in named) + " |",
        "|---|---|" + "---|" * len(named),
    ]
    for shape in (*attention.SHAPES, _WIDE):
        name = attention.name_of(shape)
        by_device = {d.name: speeds(shape, d) for d in named}
        for direction in ("forward", "backward"):
            cells = []
            for d in named:
                speed, real = by_device[d.name][direction], measured.get((name, direction, d.name))
                cells.append(f"{speed.apart:.0f} to {speed.beside:.0f}, {speed.limit}")
                cells[-1] += "" if real is None else f", measured {real:.0f}"
            lines.append(f"| {name} | {direction} | " + " | ".join(cells) + " |")
    (h100,) = (d for d in named if d.name == "H100 SXM")
    of_keys = speeds(_WIDE, h100)["backward"].tiles["_keys_kernel"]
    share = of_keys.least / of_keys.products
    lines += [
        "",
        f"dK and dV of 256 dims on sm_90 multiply at {share:.0%} of the peak at most: a key's and a value's gradients",
        "take all registers of two groups of warps, so a tile has 16 queries, whose products with 64 keys read 18",
        "cycles from shared memory for 4 of multiplication, and both groups make them. 32 queries, or 128 keys, spill.",
        "64 queries x 32 keys by the older `mma.sync` spill nothing and would read a quarter less; no GPU has said",
        "whether that is faster.",
    ]
    return "\n".join(lines) + "\n"
