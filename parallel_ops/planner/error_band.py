"""How far an estimate may be off: the errors of published rows that are like it (``validation``), in
``presets/error_bands.json``.

Rows are alike that share the generation of the GPU, whether products are in fp8, whether parameters are sharded
(ZeRO-3) and whether the job is inside one node. Where no row is as alike, the last of these that is shared decides,
and the band is wider.
"""

import functools
import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.plan import Plan


@dataclass(frozen=True, kw_only=True)
class ErrorBand:
    """Relative half-widths, 0.1 for 10 %, that hold four of five of the published rows that are like the estimate.

    Attributes:
        time: of the step time, and so of throughput and MFU. ``memory``: of the peak memory.
        rows: published step times that ``time`` is from; 0 where nothing published is like it.
        like: what these rows have in common, for a reader.
    """

    time: float
    memory: float
    rows: int
    like: str

    def sentence(self) -> str:
        """What ``±`` means beside a figure."""
        of = f"{self.rows} published runs like it ({self.like})" if self.rows else "published runs of other kinds"
        return (
            f"± {self.time:.0%} of times and rates and ± {self.memory:.0%} of memory hold four of five of the errors "
            f"in {of}."
        )


def error_band(cluster: Cluster, plan: Plan) -> ErrorBand:
    """The error band of an estimate of ``plan`` on ``cluster``."""
    table = _table()
    for key in keys(cluster, plan):
        if key in table:
            return ErrorBand(**table[key], like=key)
    return ErrorBand(**table["any"], like="any")


def keys(cluster: Cluster, plan: Plan) -> tuple[str, ...]:
    """What rows like it may be called in ``presets/error_bands.json``, the most alike first."""
    dtype = "fp8" if plan.dtype == "fp8" else "16-bit"
    sharded = "zero-3" if plan.zero == 3 else "zero-0 to 2"
    size = "one node" if plan.gpus <= cluster.gpus_per_node else "several nodes"
    names = cluster.gpu.generation, dtype, sharded, size
    return tuple(", ".join(names[:count]) for count in range(len(names), 0, -1))


def tied(seconds: float, best: float, width: float) -> bool:
    """Whether a plan of ``seconds`` cannot be told from one of ``best``, whose band is ``width``.

    Plans of one search share most of their error, so half of the band is what divides them.
    """
    return seconds <= best * (1 + width / 2)


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    text = files("parallel_ops.planner.presets").joinpath("error_bands.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)["bands"]
    return table
