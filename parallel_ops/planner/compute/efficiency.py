"""Shares of the hardware's peak that are reached, by GPU generation; sources are in ``presets/efficiency.json``."""

import functools
import json
import warnings
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

from parallel_ops.planner.checks import check_figures
from parallel_ops.planner.hashing import hashed_once


@hashed_once
@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peak that a GPU generation reaches, and overheads in seconds.

    Attributes:
        matmul: share of the 16-bit peak FLOP/s that large 16-bit matrix products reach.
        fp8: share of the fp8 peak that large fp8 matrix products reach.
        flash_forward, flash_backward: share of the 16-bit peak that FlashAttention reaches; masked blocks do not count.
        memory: share of the memory bandwidth that elementwise ops and the optimizer reach.
        links, network: share of the bandwidth inside and between nodes that collectives reach.
        interference: cost of overlap, as a share of the shorter of communication and computation. Both use the same
            multiprocessors and memory.
        host: seconds that the host takes to launch the forward pass of one layer; the same for a backward pass.
        collective: seconds of a collective beyond latency and bandwidth, per doubling of the ranks: launch and the wait
            for the last rank.

    Raises:
        ValueError, TypeError: naming the field that is wrong.
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

# Bytes/s per GPU of PCIe 4.0 x16, and of host memory in the optimizer step. Assumed.
HOST_LINK = 25e9
HOST_MEMORY = 25e9


@functools.cache
def _file() -> dict[str, Any]:
    text = files("parallel_ops.planner.presets").joinpath("efficiency.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def table() -> dict[str, dict[str, dict[str, Any]]]:
    """``value`` and ``source`` of each constant, by generation."""
    known: dict[str, dict[str, dict[str, Any]]] = _file()["generations"]
    return known


@functools.cache
def efficiency(generation: str) -> Efficiency:
    """The constants of a GPU generation.

    A generation without measured constants gets those of the nearest one, with a warning.
    """
    known = table()
    if generation not in known:
        other = _file()["stand_ins"].get(generation, "ampere")
        warnings.warn(
            f"no measured efficiencies of {generation} GPUs: those of {other} are used, step times may be far off",
            stacklevel=2,
        )
        generation = other
    return Efficiency(**{name: float(entry["value"]) for name, entry in known[generation].items()})
