"""Compares every published row with the planner, and checks the promises about the errors."""

import functools
from collections.abc import Iterable, Iterator

from parallel_ops.planner.error_band import error_band
from parallel_ops.planner.feasibility import quick_memory_problem
from parallel_ops.planner.memory.memory import memory
from parallel_ops.planner.presets.figures import figures
from parallel_ops.planner.results import DEVICE_MEMORY, GIB, StageMemory
from parallel_ops.planner.speed import without_collection
from parallel_ops.planner.validation.bubbles import BUBBLES, EXACT, bubble_rows
from parallel_ops.planner.validation.large_runs import titan_setting
from parallel_ops.planner.validation.measurement import Measurement, table
from parallel_ops.planner.validation.published import measurements, zero_bubble_setting
from parallel_ops.planner.validation.published_runs import published_runs
from parallel_ops.planner.validation.refits import predicted_without, refitted_tables, without_own_table
from parallel_ops.planner.validation.report import LeftOut, Promise, Report, Row, bias, mean_error

# Largest mean error of each table of step times.
PROMISES: dict[str, float] = figures("validation/promises")
# A run that happened may come out as this much larger than the memory of its GPU.
FITS_WITHIN = 0.02


@without_collection()
def validate() -> Report:
    """Compares the planner with every published table in the package."""
    rows = (*_steps(), *memory_rows(), *bubble_rows())
    promises = *_step_promises(rows), *_recent_promises(rows), *_other_promises(Report(rows=rows, promises=()))
    return Report(rows=rows, promises=promises, left_out=tuple(_left_out()))


def _step_promises(rows: tuple[Row, ...]) -> Iterator[Promise]:
    steps = tuple(row for row in rows if row.quantity == "step time")
    held_out = tuple(row for row in steps if row.role == "held out")
    yield Promise(name="step time: mean error", value=mean_error(steps), limit=0.10)
    yield Promise(name="step time: bias", value=abs(bias(steps)), limit=0.04)
    yield Promise(name="step time: mean error of the rows held out", value=mean_error(held_out), limit=0.10)
    for name, limit in PROMISES.items():
        found = tuple(row for row in steps if row.table == name)
        yield Promise(name=f"step time, {name}: mean error", value=mean_error(found), limit=limit)
    predicted = {(row.table, row.name): row.predicted for row in steps}
    lost = regrets(predicted)
    yield Promise(
        name="fastest plan of a group: mean time lost by the planner's choice",
        value=_mean_of(lost.values()),
        limit=0.03,
    )
    right = [value == 0 for group, value in lost.items() if group.startswith("zero bubble")]
    wrong = len(right) - sum(right)
    yield Promise(name="zero bubble table 4: comparisons whose fastest schedule is not picked", value=wrong, limit=3)


def _recent_promises(rows: tuple[Row, ...]) -> Iterator[Promise]:
    """Promises about the runs of 2024 to 2026, about error bands, and about constants that follow a single table."""
    recent = {row.table for row in published_runs()}
    tables = [tuple(row for row in rows if row.quantity == "step time" and row.table == name) for name in recent]
    means, all_recent = [mean_error(found) for found in tables], tuple(row for found in tables for row in found)
    yield Promise(name="runs of 2024 to 2026: mean error, over sources", value=sum(means) / len(means), limit=0.08)
    yield Promise(name="runs of 2024 to 2026: largest mean error of a source", value=max(means), limit=0.21)
    yield Promise(name="runs of 2024 to 2026: bias", value=abs(bias(all_recent)), limit=0.03)
    large = [row.table for row in measurements() if _too_large(row)]
    newer = sum(name in recent for name in large)
    yield Promise(name="runs of 2024 to 2026 that are called out of memory", value=newer, limit=0)
    yield Promise(name="runs that happened and are called out of memory", value=len(large), limit=0)
    outside = [abs(predicted / row.seconds - 1) > _band(row) for row, predicted in without_own_table()]
    kept = [wrong for (row, _), wrong in zip(without_own_table(), outside, strict=True) if row.table in recent]
    yield Promise(name="error bands: rows outside, their table left out", value=sum(outside) / len(outside), limit=0.20)
    yield Promise(name="error bands: runs of 2024 to 2026 outside", value=sum(kept) / len(kept), limit=0.20)
    moved = max(abs(found.others) for found in _left_out())
    yield Promise(name="a table left out: most that the mean error of the others moves", value=moved, limit=0.02)


def _too_large(row: Measurement) -> bool:
    found = quick_memory_problem(row.model, row.cluster, row.plan)
    return found is not None and found.excess > FITS_WITHIN * row.cluster.gpu.memory


def _band(row: Measurement) -> float:
    return error_band(row.cluster, row.plan, software=row.software, experts=row.model.expert_kind).time


@functools.cache
def _left_out() -> tuple[LeftOut, ...]:
    """Changes of the errors when each table of step times is left out."""
    shipped: dict[str, list[float]] = {}
    for row in measurements():
        shipped.setdefault(row.table, []).append(abs(row.predicted(exact=False) / row.seconds - 1))
    made = []
    for table_out in refitted_tables():
        without: dict[str, list[float]] = {}
        for row in measurements():
            without.setdefault(row.table, []).append(predicted_without(table_out, row) / row.seconds - 1)
        own = without.pop(table_out)
        moved = {name: _mean_of(map(abs, each)) - _mean_of(shipped[name]) for name, each in without.items()}
        most = max(moved, key=lambda name: abs(moved[name]))
        made.append(
            LeftOut(
                table=table_out,
                rows=len(own),
                mean=_mean_of(map(abs, own)),
                bias=_mean_of(own),
                others=_mean_of(moved.values()),
                most=moved[most],
                most_moved=most,
            )
        )
    return tuple(made)


def _mean_of(values: Iterable[float]) -> float:
    found = tuple(values)
    return sum(found) / len(found)


def _other_promises(report: Report) -> Iterator[Promise]:
    measured = report.select("memory")
    bubbles = {kind: [r for r in report.select("bubble") if f", {kind}," in r.name] for kind in BUBBLES}
    exact = [row for kind in EXACT for row in bubbles[kind]]
    for quantity, limit in (("step time", 0.06), ("memory", 0.015)):
        found = tuple(row for row in report.select(quantity) if row.table.startswith("SimuMax"))
        yield Promise(name=f"SimuMax's runs on B200, {quantity}: mean error", value=mean_error(found), limit=limit)
    yield Promise(name="measured memory: mean error", value=mean_error(measured), limit=0.08)
    yield Promise(name="measured memory: furthest below", value=max(-row.error for row in measured), limit=0.06)
    yield Promise(
        name="bubble: largest difference in 1F1B, ZB-H1, ZB-H2 and ZB-1p",
        value=max(abs(round(row.predicted, 4) - row.published) for row in exact),
        limit=0,
    )
    yield Promise(
        name="bubble: largest difference in ZB-2p",
        value=max(abs(row.predicted - row.published) for row in bubbles["zb-2p"]),
        limit=1.5e-4,
    )


def regrets(predicted: dict[tuple[str, str], float]) -> dict[str, float]:
    """Relative time lost by the planner's choice, by group of measured plans for the same work.

    The loss is the measured time of the plan with the least predicted time over the least measured time, minus 1.
    ``predicted``: seconds by table and name of a row.
    """
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in measurements():
        if row.group:
            groups.setdefault(row.group, []).append((predicted[row.table, row.name], row.seconds))
    chosen = {name: min(rows)[1] / min(seconds for _, seconds in rows) - 1 for name, rows in groups.items()}
    return {name: lost for name, lost in chosen.items() if len(groups[name]) > 1}


def _steps() -> Iterator[Row]:
    for row in measurements():
        yield Row(
            source=row.source,
            table=row.table,
            name=row.name,
            quantity="step time",
            unit="s",
            published=row.seconds,
            predicted=row.predicted(),
            role="fitted" if row.fitted else "held out",
        )


def memory_rows() -> Iterator[Row]:
    """Every measured memory beside the estimate and the parts of its sum."""
    bubbles, titan = table("zero_bubble"), table("torchtitan")
    for row in bubbles["table 4"]:
        for kind, measured in row["gigabytes"].items():
            # Memory of tensors, without the allocator, the driver and NCCL.
            parts = _parts(memory(*zero_bubble_setting(row, kind, row["micro_batches"])), 1e9, "runtime")
            yield _memory_row(bubbles["source"], "table 4", f"{row['model']}, {kind}", "GB", measured, parts)
    for row in titan["rows"]:
        model, _, plan = titan_setting(row)
        # Memory reserved by the allocator, without the driver and NCCL.
        parts = _parts(memory(model, plan, runtime=0.0), GIB)
        name = f"table {row['table']}, {row['model']}, {model.seq_length} tokens: {plan.describe()}"
        name += "" if plan.fused_ops else ", eager"
        yield _memory_row(titan["source"], "tables 1 to 6", name, "GiB", row["gibibytes"], parts)
    for run in published_runs():
        if run.memory and run.software != "deepspeed-2024":
            # Memory of tensors.
            parts = _parts(memory(run.model, run.plan), GIB, "runtime")
            yield _memory_row(run.source, run.table, run.name, "GiB", run.memory, parts)


def _memory_row(source: str, part: str, name: str, unit: str, published: float, parts: dict[str, float]) -> Row:
    return Row(
        source=source,
        table=part,
        name=name,
        quantity="memory",
        unit=unit,
        published=published,
        predicted=sum(parts.values()),
        role="held out",
        parts=parts,
    )


def _parts(stages: tuple[StageMemory, ...], unit: float, without: str = "") -> dict[str, float]:
    """The parts of the memory of the stage with the most, in ``unit``. ``without``: a part that is not measured."""
    names = [name for name in DEVICE_MEMORY if name != without]
    found = [{name: getattr(stage, name) / unit for name in names} for stage in stages]
    return max(found, key=lambda parts: sum(parts.values()))
