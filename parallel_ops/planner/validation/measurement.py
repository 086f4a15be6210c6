"""A measured step, and readers of the files in this folder."""

import csv
import functools
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.compute.software import constants_of
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.presets.figures import figures
from parallel_ops.planner.step import StepTime


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured step.

    Attributes:
        source, table, name: where the row is from.
        seconds: measured step time.
        group: shared by rows with the same model, batch and GPUs, of which a search picks the fastest; "" for none.
        fitted: whether the constants were fitted to this row.
        software: name of an era (``compute.software``).
        memory: measured memory of the worst GPU in GiB; 0 if it is not published.
    """

    source: str
    table: str
    name: str
    model: Model
    cluster: Cluster
    plan: Plan
    seconds: float
    group: str = ""
    fitted: bool = True
    software: str = "megatron-2021"
    memory: float = 0.0

    def predicted(self, constants: Efficiency | None = None, *, exact: bool = True) -> float:
        """The planner's step time in seconds, also for plans that a search rejects, such as TP over two nodes.

        Args:
            constants: efficiencies; ``None`` for those of the GPU's generation and the software.
            exact: simulate the whole pipeline; else a smaller one, as in a search.
        """
        step = StepTime(self.model, self.cluster, self.plan, constants or constants_of(self.cluster, self.software))
        return step.simulated_seconds() if exact else step.seconds()


def table(name: str) -> dict[str, Any]:
    """The content of a JSON file in ``tables``."""
    return figures(f"validation/tables/{name}")


@functools.cache
def rows(name: str) -> tuple[str, list[dict[str, str]]]:
    """Source and rows of a CSV file in ``tables``. Its first line is a comment with the source."""
    file = files("parallel_ops.planner.validation").joinpath(f"tables/{name}.csv")
    first, *lines = file.read_text(encoding="utf-8").splitlines()
    lines[0] = lines[0].removeprefix("# ")
    return first.removeprefix("# "), list(csv.DictReader(lines))
