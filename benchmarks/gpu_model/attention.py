"""How full the attention kernels keep a GPU: the programs of a launch, scheduled in their order.

A SM that has a place takes the next program. A program takes as long as it has tiles, and one more to begin
and end. The grid, its order and its tiles are those that the launcher chooses; how many programs an SM has a
place for is that of the compiled kernel.
"""

import functools
import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.gpu_model.devices import Device
from benchmarks.gpu_model.facts import arguments_of  # which puts the tests' executor on the path

KERNELS = {"_forward_kernel": "forward", "_keys_kernel": "dK, dV", "_queries_kernel": "dQ"}

# Sequences, tokens, heads, key heads, dims, window: Llama 3 70B at tensor parallel 8, 8B, long sequences, a window.
Shape = tuple[int, int, int, int, int, int | None]
SHAPES: tuple[Shape, ...] = (
    (1, 8192, 8, 1, 128, None),
    (1, 4096, 8, 1, 128, None),
    (1, 8192, 32, 8, 128, None),
    (4, 2048, 32, 8, 128, None),
    (1, 32768, 4, 1, 128, None),
    (1, 8192, 32, 32, 64, None),
    (1, 8192, 32, 8, 128, 1024),
)


class Grid(NamedTuple):
    """A launch: its programs in pairs of a head (or a part of a group) and a batch, in sections."""

    kernel: str
    tokens: int
    own: int  # tokens of a program's block
    others: int  # tokens of a tile
    pairs: int
    section: int
    members: int  # heads that a program takes one after the other
    window: int | None
    resident: int = 1

    @property
    def blocks(self) -> int:
        return -(-self.tokens // self.own)

    @property
    def programs(self) -> int:
        return self.blocks * self.pairs

    def tiles(self, block: int) -> int:
        """Tiles of one block under a causal mask."""
        first, last = block * self.own, min((block + 1) * self.own, self.tokens) - 1
        if self.kernel == "_keys_kernel":
            low, high = first, self.tokens if self.window is None else min(last + self.window, self.tokens)
        else:
            low, high = 0 if self.window is None else max(0, first - self.window + 1), last + 1
        return -(-high // self.others) - low // self.others

    def times(self) -> list[int]:
        """Tiles of each program, in the order in which they start."""
        lengths = [self.members * self.tiles(block) + 1 for block in range(self.blocks)]
        if self.kernel != "_keys_kernel":
            lengths.reverse()
        sections = [min(self.section, self.pairs - first) for first in range(0, self.pairs, self.section)]
        return [time for size in sections for time in lengths for _ in range(size)]

    def busy(self, multiprocessors: int) -> float:
        return busy(self.times(), multiprocessors * self.resident)


def busy(times: Sequence[int], places: int) -> float:
    """Share of the time in which places have a program, which each takes as soon as it is free."""
    free = [0] * places
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    return sum(times) / (max(free) * places)


@functools.cache
def grids(shape: Shape, device: Device, *, compiled: bool = True) -> list[Grid]:
    """Grids of a forward and a backward in bfloat16, as the launchers choose them for the device.

    ``compiled``: for each, how many programs an SM has a place for; otherwise one.
    """
    from parallel_ops.triton_kernels.attention import flash_attention as kernels
    from parallel_ops.triton_kernels.attention import grids as chosen
    from ptx import aot

    batch, tokens, heads, kv_heads, dims, window = shape
    q, k = (torch.empty(tokens, batch, h, dims, dtype=torch.bfloat16, device="meta") for h in (heads, kv_heads))
    statistics = torch.empty(3, batch, heads, tokens, device="meta")
    options: dict[str, Any] = {"left": None if window is None else 1 - window, "right": 0, "spans": None}
    options |= {"scale": 0.1, "softcap": 0.0, "dropout": None}
    with (
        mock.patch.object(chosen, "multiprocessors", return_value=device.multiprocessors),
        aot.recorded() as recorded,
        aot.chosen_for(device.capability),
    ):
        kernels.forward(q, k, k, q, statistics[:2], merge=False, **options)
        kernels.backward(q, q, k, k, statistics, q, k, k, accumulate_dq=False, query_spans=None, **options)
    found = []
    for launch in recorded:
        if launch.name not in KERNELS:
            continue
        arguments = arguments_of(launch)
        own, others = "BLOCK_QUERIES", "BLOCK_KEYS"
        if launch.name == "_keys_kernel":
            own, others = others, own
        resident = 1
        if compiled:
            code = aot.compile_for(launch, device.capability)
            resident = device.resident(code.registers, dict(launch.options)["num_warps"], code.shared_bytes)
        members = arguments["group"] // arguments["splits"] if launch.name == "_keys_kernel" else 1
        grid = Grid(
            launch.name, tokens, arguments[own], arguments[others], arguments["pairs"], arguments["section"], members,
            window, resident,
        )  # fmt: skip
        if launch.call[2][0] != grid.programs:
            raise ValueError(f"{launch} has {launch.call[2][0]} programs, not {grid.programs}")
        found.append(grid)
    return found


def name_of(shape: Shape) -> str:
    *sizes, window = shape
    return "x".join(map(str, sizes)) + ("" if window is None else f", window {window}")


def section(devices: Sequence[Device]) -> str:
    """The part of the page about attention, in Markdown."""
    named = [d for d in devices if d.name in ("A100", "H200", "B200")]
    lines = [
        "## How full attention keeps a GPU",
        "",
        "| shape | kernel | " + " | ".join(f"{d.name}, {d.multiprocessors}" for d in named) + " |",
        "|---|---|" + "---|" * len(named),
    ]
    for shape in SHAPES:
        name = name_of(shape)
        by_device = [grids(shape, device) for device in named]
        for kernels in zip(*by_device, strict=True):
            cells = [
                f"{g.programs} programs {g.busy(d.multiprocessors):.0%}" for g, d in zip(kernels, named, strict=True)
            ]
            lines.append(f"| {name} | {KERNELS[kernels[0].kernel]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
