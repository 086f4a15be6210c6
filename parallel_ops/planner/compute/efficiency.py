"""How much of the hardware's peak is reached, by GPU generation: ``presets/efficiency.json``, with a source for every
figure."""

import functools
import json
import warnings
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

from parallel_ops.planner.checks import check_figures


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What a generation of GPUs, and the software of its time, reach of their peak.

    Attributes:
        matmul: share of the peak FLOP/s of a large 16-bit matrix product. ``fp8``: of the fp8 peak, in fp8.
        flash_forward, flash_backward: share of the 16-bit peak of FlashAttention, counting what a causal mask leaves.
        memory: share of the memory bandwidth in elementwise ops and the optimizer.
        links, network: share of the bandwidth inside and between nodes, in collectives.
        interference: of the time of overlapped communication and computation, the shorter of the two, that is lost all
            the same, since both use the same multiprocessors and memory.
        host: seconds that the host takes to launch the forward pass of one layer; a backward pass takes as long.
        collective: seconds that a collective takes beyond latency and bandwidth: launch and the wait for the last rank.
    """

    matmul: float
    fp8: float
    flash_forward: float
    flash_backward: float
    memory: float
    links: float
    network: float
    interference: float
    host: float = 0.0
    collective: float = 0.0

    def __post_init__(self) -> None:
        check_figures(self, SHARES)
        check_figures(self, SECONDS, zero=True)
        for name in SHARES:
            if getattr(self, name) > 1:
                raise ValueError(f"Efficiency: {name} must be at most 1, got {getattr(self, name)}")


SECONDS = ("host", "collective")
SHARES = tuple(f.name for f in fields(Efficiency) if f.name not in SECONDS)
CONSTANTS = (*SHARES, *SECONDS)

# PCIe 4.0 x16 as one GPU sees it, and the share of the host's memory bandwidth that its optimizer step gets. Assumed.
HOST_LINK = 25e9
HOST_MEMORY = 25e9


@functools.cache
def _file() -> dict[str, Any]:
    text = files("parallel_ops.planner.presets").joinpath("efficiency.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def table() -> dict[str, dict[str, dict[str, Any]]]:
    """``value`` and ``source`` of each constant of each generation that has its own."""
    known: dict[str, dict[str, dict[str, Any]]] = _file()["generations"]
    return known


@functools.cache
def efficiency(generation: str) -> Efficiency:
    """The constants of a GPU generation.

    Where it has none of its own, those of the one nearest to it stand in, with a warning: nothing published about it
    was compared.
    """
    known = table()
    if generation not in known:
        other = _file()["stand_ins"].get(generation, "ampere")
        warnings.warn(
            f"no measured efficiencies of {generation} GPUs: those of {other} stand in, step times may be far off",
            stacklevel=2,
        )
        generation = other
    return Efficiency(**{name: float(entry["value"]) for name, entry in known[generation].items()})
