"""Fits the parts of software eras to published runs of 2024 to 2026, with the constants of the GPU generations fixed.

``python -m benchmarks.planner_fit_software`` (minutes; after ``planner_fit``) writes the values and ranges of
``presets/software.json``, the constants of fits without each source in turn to ``validation/refits.json``, and the
error bands (``presets/error_bands.json``).
"""

import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.planner_fit import FLASH_BACKWARD, descended, differing, mean_error, moved, written
from parallel_ops.planner import presets, validation
from parallel_ops.planner.compute.efficiency import SHARES
from parallel_ops.planner.compute.software import FEWEST_TABLES, era, parts, with_parts
from parallel_ops.planner.validation.measurement import Measurement
from parallel_ops.planner.validation.published import measurements

STEPS = (0.2, 0.1, 0.05, 0.02)
# How much a constant may leave its start: it costs PRIOR per factor of e. Without it, a constant that few rows depend
# on would follow the last of them.
PRIOR = 0.006
# A table carries a constant if a step of 10 % moves its times by this much on average; the range of a constant that few
# tables carry is at least FEW around its value.
CARRIED, FEW = 0.005, 0.1

Values = dict[tuple[str, str, str], float]

# The start of a fit: round values between what kernels reach in isolation and what the runs of 2021 to 2023 reached. A
# node of 16 GPUs updates 10 billion parameters in 15 s with PyTorch's CPU Adam (arXiv:2101.06840, table 4).
_BEGIN = {
    "matmul": 0.7,
    "fp8": 0.7,
    "flash_forward": 0.35,
    "interference": 0.3,
    "tp_overlap": 0.9,
    "grouped_fp8": 0.7,
    "host": 5e-4,
    "expert_host": 1.2e-3,
    "host_memory": 2.5e9,
}


def start() -> Values:
    """The fitted constants as shipped, by part, generation and name."""
    text = (Path(presets.__file__).parent / "software.json").read_text(encoding="utf-8")
    data = json.loads(text)
    return {
        (part, generation, name): float(entry["value"])
        for kind in ("kernels", "runtimes")
        for part, generations in data[kind].items()
        for generation, entries in generations.items()
        for name, entry in entries.items()
        if entry["source"] == "fit"
    }


def predicted(row: Measurement, values: Values) -> float:
    """Seconds of a row's step, with a pipeline as in a search."""
    made = parts()
    for (part, generation, name), value in values.items():
        made[part].setdefault(generation, {})[name] = value
        if name == "flash_forward":
            made[part][generation]["flash_backward"] = value * FLASH_BACKWARD
    return row.predicted(
        with_parts(row.cluster.gpu.generation, era(row.software), made, gpu=row.cluster.gpu.name), exact=False
    )


def sample() -> list[Measurement]:
    """The rows of software whose parts have fitted constants."""
    fitted = {part for part, _, _ in start()}
    return [row for row in measurements() if row.fitted and {*era(row.software).parts} & fitted]


def loss(values: Values, rows: Sequence[Measurement], begin: Values) -> float:
    """The mean error of the rows, and what the constants have moved."""
    return mean_error(rows, [predicted(row, values) for row in rows]) + PRIOR * moved(values, begin)


def fit(rows: Sequence[Measurement], begin: Values) -> Values:
    """The constants with the smallest ``loss`` of ``rows``, by coordinate descent from ``begin``."""
    return descended(begin, lambda values: loss(values, rows, begin), STEPS, lambda key: key[2] in SHARES, 1e-6)


def named(values: Values) -> dict[str, float]:
    """The constants of ``values`` for ``validation/refits.json``."""
    found = {}
    for (part, generation, name), value in values.items():
        found[f"{part}/{generation}/{name}"] = value
        if name == "flash_forward":
            found[f"{part}/{generation}/flash_backward"] = float(f"{value * FLASH_BACKWARD:.3g}")
    return found


def refits(begin: Values) -> dict[str, Values]:
    """For each source, the constants of a fit to the others from ``begin``."""
    rows = sample()
    return {
        source: fit([row for row in rows if row.table != source], begin)
        for source in dict.fromkeys(row.table for row in rows)
    }


Moved = dict[tuple[str, str, str], tuple[list[str], float]]


def carriers(values: Values, rows: Sequence[Measurement]) -> Moved:
    """For each constant the tables of ``rows`` that carry it, which a step of 10 % moves by ``CARRIED``, and the
    relative change of the row that moves most by that of the constant."""
    before = [predicted(row, values) for row in rows]
    found = {}
    for key, value in values.items():
        tables: dict[str, list[float]] = defaultdict(list)
        for row, seconds in zip(rows, before, strict=True):
            change = abs(math.log(predicted(row, values | {key: value / 1.1}) / seconds))
            tables[row.table].append(change)
        carry = sorted(name for name, each in tables.items() if sum(each) / len(each) >= CARRIED)
        found[key] = carry, float(f"{max(max(each) for each in tables.values()) / math.log(1.1):.2g}")
    return found


def main() -> None:
    begin = {key: _BEGIN[key[2]] for key in start()}
    values = fit(sample(), begin)
    without = refits(begin)
    carried = carriers(values, sample())
    path = Path(presets.__file__).parent / "software.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    for (part, generation, name), value in values.items():
        kind = "kernels" if part in data["kernels"] else "runtimes"
        each = [found[part, generation, name] for found in (*without.values(), values)]
        tables, effect = carried[part, generation, name]
        if len(tables) < FEWEST_TABLES:
            each += [float(f"{value * factor:.4g}") for factor in (1 - FEW, 1 + FEW)]
        entries = data[kind][part][generation]
        entries[name] |= {"value": value, "range": [min(each), max(each)], "tables": tables, "effect": effect}
        if name == "flash_forward":
            entries["flash_backward"]["value"] = float(f"{value * FLASH_BACKWARD:.3g}")
    path.write_text(written(data), encoding="utf-8")
    path = Path(validation.__file__).parent / "refits.json"
    known = json.loads(path.read_text(encoding="utf-8"))
    for name, found in without.items():
        own = {key: value for key, value in known.get(name, {}).items() if key.count("/") == 1}  # of generations
        known[name] = own | differing(named(found), named(values))
    path.write_text(written(known), encoding="utf-8")
    # The constants are read once in a process.
    subprocess.run([sys.executable, "-c", "from benchmarks.planner_fit import write_bands; write_bands()"], check=True)


if __name__ == "__main__":
    main()
