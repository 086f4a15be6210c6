"""How much of the hardware's peak is reached: three fitted constants a GPU generation, and what all share."""

import functools
import json
from dataclasses import dataclass
from importlib.resources import files

from parallel_ops.planner._check import check_figures


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peak, each above 0 and at most 1. All but ``memory`` are fitted.

    Attributes:
        matmul: of the FLOP/s of large matrix products.
        network: of the bandwidth of links, in collectives.
        interference: of the time of overlapped communication and computation, the shorter of the two, that is lost all
            the same, since both use the same multiprocessors and memory.
        memory: of the memory bandwidth, in elementwise ops and the optimizer. Assumed.
    """

    matmul: float
    network: float
    interference: float
    memory: float = 0.85

    def __post_init__(self) -> None:
        check_figures(self, CONSTANTS)
        for name in CONSTANTS:
            if getattr(self, name) > 1:
                raise ValueError(f"Efficiency: {name} must be at most 1, got {getattr(self, name)}")


FITTED = ("matmul", "network", "interference")
CONSTANTS = (*FITTED, "memory")

# FlashAttention-2 on an A100 with a causal mask: 62 % of the peak, counting the half of the scores that is computed
# (arXiv:2307.08691, figure 4, forward and backward, head width 128, 16k tokens).
FLASH_EFFICIENCY = 0.6
# PCIe 4.0 x16 as one GPU sees it, and the share of the host's memory bandwidth that its optimizer step gets. Assumed.
HOST_LINK = 25e9
HOST_MEMORY = 25e9


@functools.cache
def _table() -> dict[str, dict[str, float]]:
    text = files("parallel_ops.planner.presets").joinpath("efficiency.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, float]] = json.loads(text)["generations"]
    return table


@functools.cache
def efficiency(generation: str) -> Efficiency:
    """The constants of a GPU generation; of Ampere, the only one with published tables here, where it has none of its
    own."""
    table = _table()
    return Efficiency(**table.get(generation, table["ampere"]))
