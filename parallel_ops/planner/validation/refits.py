"""Step times with constants that were fitted without a table: how far off the planner is on runs it has not seen.

``refits.json``, written by ``benchmarks.planner_fit``, has for each table of step times the constants of a fit to all
other tables that differ from those that ship: of GPU generations (``"hopper/matmul"``) or of software
(``"transformer-engine/hopper/fp8"``).
"""

import functools
from collections import defaultdict

from parallel_ops.planner.compute.efficiency import Efficiency, generation_constants
from parallel_ops.planner.compute.software import Parts, era, parts, with_parts
from parallel_ops.planner.presets.figures import figures
from parallel_ops.planner.validation.measurement import Measurement
from parallel_ops.planner.validation.published import measurements


def refitted_tables() -> tuple[str, ...]:
    """The tables that were left out, one at a time."""
    return tuple(figures("validation/refits"))


def predicted_without(table: str, row: Measurement, *, exact: bool = False) -> float:
    """The planner's step time of ``row`` in seconds, with the constants of the fit without ``table``."""
    return row.predicted(_constants(table, row.cluster.gpu.generation, row.software, row.cluster.gpu.name), exact=exact)


@functools.cache
def without_own_table() -> tuple[tuple[Measurement, float], ...]:
    """Each measured step, and its seconds as predicted with constants that were fitted without its table."""
    tables = refitted_tables()
    return tuple(
        (row, predicted_without(row.table, row) if row.table in tables else row.predicted(exact=False))
        for row in measurements()
    )


@functools.cache
def _constants(table: str, generation: str, software: str, gpu: str) -> Efficiency:
    own: dict[str, float] = {}
    made: Parts = defaultdict(lambda: defaultdict(dict), {name: dict(part) for name, part in parts().items()})
    near = generation_constants(generation)[1]
    for key, value in figures("validation/refits")[table].items():
        *part, of, name = key.split("/")
        if not part and of == near:
            own[name] = value
        elif part:
            made[part[0]][of] = {**made[part[0]][of], name: value}
    return with_parts(generation, era(software), made, own, gpu=gpu)
