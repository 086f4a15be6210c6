"""What ``--json`` prints: results for ``show``."""

import json
import math
from collections.abc import Sequence
from typing import Any

from parallel_ops.planner.cli.workload import FIELDS
from parallel_ops.planner.compute.software import fitted_constants
from parallel_ops.planner.error_band import error_band
from parallel_ops.planner.export import systems
from parallel_ops.planner.feasibility import memory_problem
from parallel_ops.planner.results import Estimate
from parallel_ops.planner.schedules.schedule import Simulation
from parallel_ops.planner.search.losses import loss
from parallel_ops.planner.search.result import SearchResult
from parallel_ops.planner.validation import Report
from parallel_ops.planner.validation.measurement import Measurement


def estimate_data(estimate: Estimate) -> dict[str, Any]:
    """An estimate for ``show``, with its properties; cluster and model by name."""
    return {
        **vars(estimate),
        "model": estimate.model.name,
        "seq_length": estimate.model.seq_length,
        "cluster": estimate.cluster.name,
        "memory": [{**vars(stage), "total": stage.total} for stage in estimate.memory],
        "broken_rules": dict(estimate.broken_rules),
        "tflops_per_gpu": estimate.tflops_per_gpu,
        "workload": {name: getattr(estimate.model, name) for name in FIELDS},
        "loss_tokens_per_second": estimate.loss_tokens_per_second,
        "error_band": estimate.error_band,
        "tight": estimate.tight,
        "fits": memory_problem(estimate.cluster, estimate.plan, estimate.memory) is None,
        "systems": systems(estimate.model, estimate.cluster, estimate.plan),
    }


def search_data(result: SearchResult, shown: Sequence[Estimate]) -> dict[str, Any]:
    """A search for ``show``."""

    def beside(found: Estimate | None) -> dict[str, Any] | None:
        return {**estimate_data(found), "loss": loss(result.best, found)} if found else None

    return {
        "plans": [beside(found) for found in shown],
        "ties": result.ties,
        "simplest": result.simplest.plan,
        "own": beside(result.own),
        "plain": beside(result.plain),
        "published": result.recipe and {**result.recipe._asdict(), "fastest": beside(result.published)},
        "misses": [{"plan": miss.plan, "excess": miss.excess, "step": miss.seconds} for miss in result.misses],
        "gains": [
            {"resource": gain.resource, "more": gain.more, "plan": gain.plan, "step": gain.seconds}
            for gain in result.gains
        ],
        "rejected": [
            {
                "kind": kind,
                "plans": count,
                "example": f"{nearest.plan.describe()}: {nearest.reason}",
                "plan": nearest.plan,
                "reason": nearest.reason,
                "excess": nearest.excess,
            }
            for kind, (count, nearest) in result.rejected.nearest().items()
        ],
        "sensitivity": result.sensitivity,
    }


def simulation_data(simulation: Simulation) -> dict[str, Any]:
    """A simulated schedule for ``show``: kind, micro-batch, stage, start and end of each pass."""
    ranks = [
        [{**action._asdict(), "start": start, "end": end} for action, start, end in zip(*rows, strict=True)]
        for rows in zip(simulation.schedule, simulation.starts, simulation.ends, strict=True)
    ]
    of_step = ("step_time", "step_time_without_barrier", "bubble", "bubble_without_barrier")
    names = (*of_step, "bubbles", "peak_activations")
    return {**{name: getattr(simulation, name) for name in names}, "ranks": ranks}


def report_data(report: Report) -> dict[str, Any]:
    """The error table for ``show``."""
    return {
        "tables": report.summaries(),
        "rows": [{**vars(row), "error": row.error} for row in report.rows],
        "left_out": report.left_out,
        "constants": fitted_constants(),
        "promises": [{**vars(promise), "met": promise.met} for promise in report.promises],
    }


def own_runs_data(rows: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Data of ``own_runs``."""
    return [
        {
            "table": row.table, "run": row.name, "measured": row.seconds, "predicted": row.predicted(),
            "band": error_band(row.cluster, row.plan, software=row.software, experts=row.model.expert_kind).time,
        }
        for row in rows
    ]  # fmt: skip


# Version of what --json prints; it rises when a key goes or changes its meaning.
SCHEMA = 1


def show(data: Any) -> None:
    """Prints JSON: of dataclasses and named tuples their fields; numbers that are not finite are null."""
    print(json.dumps(_plain(data), indent=1, allow_nan=False))


def show_result(data: dict[str, Any]) -> None:
    """``show`` with the version of the keys."""
    show({"schema": SCHEMA, **data})


def _plain(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    names = getattr(data, "_fields", ()) or getattr(data, "__dataclass_fields__", ())
    data = {name: getattr(data, name) for name in names} or data
    if isinstance(data, dict):
        return {name: _plain(value) for name, value in data.items()}
    return [_plain(value) for value in data] if isinstance(data, list | tuple) else data
