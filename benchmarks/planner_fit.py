"""Fits the planner's constants to the measured step times that are marked as fitted.

``python -m benchmarks.planner_fit`` (two minutes) writes ``presets/efficiency.json`` and ``validation/refits.json`` of
``parallel_ops/planner``, and prints the error on rows that were held out. ``benchmarks.planner_fit_software`` then
fits the constants of software, and writes the error bands.
"""

import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from parallel_ops.planner import presets, validation
from parallel_ops.planner.compute.efficiency import Efficiency, table
from parallel_ops.planner.compute.software import era
from parallel_ops.planner.error_band import keys
from parallel_ops.planner.validation.measurement import Measurement
from parallel_ops.planner.validation.published import measurements
from parallel_ops.planner.validation.refits import without_own_table

GENERATIONS = ("ampere", "hopper")
# Constants of each generation, and of all: the rest of a machine differs less than its matrix units do.
OWN = ("matmul", "flash_forward")
SHARED = ("memory", "network", "interference", "host", "collective")
# FlashAttention-2 reaches up to 73 % of the peak forward and 63 % backward on an A100 (arXiv:2307.08691, section 4.1).
FLASH_BACKWARD = 63 / 73
# Weight of a table's bias beside its mean error, so that errors of both signs are preferred.
BIAS = 0.25
STEPS = (0.1, 0.03, 0.01)
# Weight of what constants have moved in a fit without one table.
PRIOR = 0.005
# The share of rows whose error a band holds, the fewest rows that make a band, and the number below which a band is at
# least as wide as that of less similar rows.
HELD, FEWEST, FEW = 0.8, 5, 10
# Limits that keep the fit quick.
MOST_ROWS, MOST_PASSES = 180, 1000
MOST_COLUMNS = 100

Values = dict[tuple[str, str], float]
Key = TypeVar("Key")


def start() -> Values:
    """The constants as shipped, by generation ("" for those of all) and name."""
    known = table()
    values = {(g, name): float(known[g][name]["value"]) for g in GENERATIONS for name in OWN}
    values["hopper", "fp8"] = float(known["hopper"]["fp8"]["value"])
    return values | {("", name): float(known["ampere"][name]["value"]) for name in SHARED}


def constants(values: Values) -> dict[str, Efficiency]:
    """The constants of each generation."""
    made = {}
    for generation in GENERATIONS:
        own = {name: values[generation, name] for name in OWN}
        own |= {name: values["", name] for name in SHARED} | {"links": float(table()[generation]["links"]["value"])}
        flash = own["flash_forward"] * FLASH_BACKWARD
        made[generation] = Efficiency(**own, fp8=values["hopper", "fp8"], flash_backward=flash)
    return made


def predicted(row: Measurement, efficiencies: Mapping[str, Efficiency]) -> float:
    """Seconds of a row's step. Long pipelines are estimated as in a search, which is within 1 %."""
    plan = row.plan
    exact = plan.pp * plan.virtual_stages * plan.micro_batches <= MOST_PASSES
    return row.predicted(efficiencies[row.cluster.gpu.generation], exact=exact)


def sample() -> list[Measurement]:
    """The rows to fit; of a table with more than ``MOST_ROWS``, evenly spaced ones."""
    tables: dict[str, list[Measurement]] = defaultdict(list)
    for row in measurements():
        if row.fitted and era(row.software).kernels == "eager":
            tables[row.table].append(row)
    return [row for rows in tables.values() for row in rows[:: math.ceil(len(rows) / MOST_ROWS)]]


def loss(values: Values, rows: Sequence[Measurement]) -> float:
    """The mean error of the rows."""
    efficiencies = constants(values)
    return mean_error(rows, [predicted(row, efficiencies) for row in rows])


def mean_error(rows: Sequence[Measurement], seconds: Sequence[float]) -> float:
    """Mean over the tables, by the root of their rows, of the mean and the bias of the logarithmic errors."""
    errors: dict[str, list[float]] = defaultdict(list)
    for row, found in zip(rows, seconds, strict=True):
        errors[row.table].append(math.log(found / row.seconds))
    weights = {name: math.sqrt(len(each)) for name, each in errors.items()}
    means = {name: (sum(map(abs, each)) + BIAS * abs(sum(each))) / len(each) for name, each in errors.items()}
    return sum(weights[name] * means[name] for name in errors) / sum(weights.values())


def moved(values: Mapping[Key, float], near: Mapping[Key, float]) -> float:
    """How far constants are from others, in factors of e."""
    return sum(abs(math.log(values[key] / near[key])) for key in values)


def descended(
    begin: Mapping[Key, float], cost: Callable[[dict[Key, float]], float], steps: Sequence[float],
    is_share: Callable[[Key], bool] = lambda _: True, gain: float = 1e-7,
) -> dict[Key, float]:  # fmt: skip
    """The constants with the smallest cost, by coordinate descent with one relative step after another.

    Args:
        is_share: Constants that are at most 1.
        gain: The least that a step must lower the cost.
    """
    best, least = dict(begin), cost(dict(begin))
    for step in steps:
        moving = True
        while moving:
            moving = False
            for key in begin:
                for factor in (1 + step, 1 / (1 + step)):
                    value = float(f"{best[key] * factor:.3g}")
                    value = min(1.0, value) if is_share(key) else value
                    if value != best[key] and (found := cost(best | {key: value})) < least - gain:
                        best[key], least, moving = value, found, True
    return best


def fit(
    rows: Sequence[Measurement] | None = None,
    steps: Sequence[float] = STEPS,
    begin: Values | None = None,
    near: Values | None = None,
) -> Values:
    """The constants with the smallest ``loss`` of ``rows``; ``None`` for ``sample()``.

    ``near``: constants that leaving costs ``PRIOR`` per factor of e, so that those that the rows do not determine stay.
    """
    given = sample() if rows is None else rows

    def cost(values: Values) -> float:
        return loss(values, given) + (PRIOR * moved(values, near) if near else 0.0)

    return descended(start() if begin is None else begin, cost, steps)


def held_out_error(seed: int, steps: Sequence[float] = STEPS[:2]) -> tuple[float, float]:
    """Mean errors of a fit to a random half of the rows, from neutral constants: on that half, and on the other."""
    rows = sample()
    random.Random(seed).shuffle(rows)
    fit_rows, held_out = rows[::2], rows[1::2]
    neutral = {key: {"host": 1e-3, "collective": 1e-4}.get(key[1], 0.6) for key in start()}
    fitted = constants(fit(fit_rows, steps, neutral))
    errors = ([abs(predicted(row, fitted) / row.seconds - 1) for row in half] for half in (fit_rows, held_out))
    fit_error, held_out_mean = (sum(half) / len(half) for half in errors)
    return fit_error, held_out_mean


def bands(errors: Sequence[tuple[tuple[str, ...], float]], memory: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The bands of ``presets/error_bands.json``.

    Args:
        errors: keys of a row (``error_band.keys``) and its relative error. Of n errors of a key, a band holds the
            smallest ``HELD`` (n + 1), so that it also holds that share of further rows like them (split conformal
            prediction, arXiv:1604.04173).
        memory: the band of memory, by the start of a key; "" for the others.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for names, error in errors:
        for name in names:
            found[name].append(abs(error))
    made: dict[str, dict[str, float]] = {}
    for name, each in sorted(found.items()):  # "a" before "a, b"
        if len(each) >= FEWEST:
            held = sorted(each)[min(len(each), math.ceil(HELD * (len(each) + 1))) - 1]
            time = math.ceil(held * 100) / 100
            above = made.get(name.rpartition(", ")[0])
            if above and len(each) < FEW:
                time = max(time, above["time"])
            space = memory[max((start for start in memory if name.startswith(start)), key=len)]
            made[name] = {"time": time, "memory": space, "rows": len(each)}
    return made


def named(values: Values) -> dict[str, float]:
    """The constants of ``values`` for ``validation/refits.json``: ``{"hopper/matmul": 0.65, ...}``."""
    return {
        f"{generation}/{name}": float(f"{getattr(efficiency, name):.4g}")
        for generation, efficiency in constants(values).items()
        for name in (*OWN, *SHARED, "fp8", "flash_backward")
    }


def refits(values: Values) -> dict[str, dict[str, float]]:
    """For each fitted table, the constants of a fit to the others that starts from ``values``."""
    rows = sample()
    return {
        table: named(fit([row for row in rows if row.table != table], STEPS[1:], values, values))
        for table in dict.fromkeys(row.table for row in rows)
    }


def differing(found: Mapping[str, float], shipped: Mapping[str, float]) -> dict[str, float]:
    """The constants that differ from those that ship: what ``validation/refits.json`` has of a fit."""
    return {name: value for name, value in found.items() if value != shipped.get(name)}


def band_keys(row: Measurement) -> tuple[str, ...]:
    """Keys of a row in ``presets/error_bands.json``: those of rows like it, and the kernels alone."""
    return (*keys(row.cluster, row.plan, row.software, row.model.expert_kind), era(row.software).kernels)


def write_bands() -> None:
    """Writes ``presets/error_bands.json`` from the errors of fits without each row's table."""
    errors = [(band_keys(row), seconds / row.seconds - 1) for row, seconds in without_own_table()]
    path = Path(presets.__file__).parent / "error_bands.json"
    text = json.loads(path.read_text(encoding="utf-8"))
    text["bands"] = bands(errors, text["memory"]) | {"any": text["bands"]["any"]}
    path.write_text(written(text), encoding="utf-8")


def main() -> None:
    values = fit()
    folder = Path(presets.__file__).parent
    known = json.loads((folder / "efficiency.json").read_text(encoding="utf-8"))
    for generation, efficiency in constants(values).items():
        for name, entry in known["generations"][generation].items():
            entry["value"] = float(f"{getattr(efficiency, name):.3g}")
    (folder / "efficiency.json").write_text(written(known), encoding="utf-8")
    shipped = {
        f"{of}/{name}": each["value"] for of, found in known["generations"].items() for name, each in found.items()
    }
    without = {name: differing(found, shipped) for name, found in refits(values).items()}
    (Path(validation.__file__).parent / "refits.json").write_text(written(without), encoding="utf-8")
    print(f"loss {loss(values, sample()):.4f}")
    for seed in range(2):
        print("mean error on the half that was fitted, and on the other: {:.1%}, {:.1%}".format(*held_out_error(seed)))


def written(data: object) -> str:
    """JSON with the short ones of the innermost dictionaries on one line."""

    def short(found: re.Match[str]) -> str:
        line = "{" + " ".join(found[1].split()) + "}"
        return line if len(line) <= MOST_COLUMNS else found[0]

    return re.sub(r"\{\n([^{}]*?)\n *\}", short, json.dumps(data, indent=2)) + "\n"


if __name__ == "__main__":
    main()
