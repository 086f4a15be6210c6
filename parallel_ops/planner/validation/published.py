"""The published tables, and the plans that they were measured with."""

import functools
import json
from dataclasses import replace
from importlib.resources import files
from typing import Any

from parallel_ops.planner import presets
from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan


@functools.cache
def table(name: str) -> dict[str, Any]:
    """The content of a JSON file of this folder."""
    data: dict[str, Any] = json.loads(files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    return data


def setting(name: str, row: dict[str, Any]) -> tuple[Model, Cluster, Plan]:
    """Model, cluster and plan of a row.

    Both systems of that time kept 16-bit gradients, stored attention scores, and, but for ZeRO-3, did not overlap
    data-parallel communication.
    """
    zero3 = row.get("system") == "zero3"
    virtual_stages = row.get("virtual_stages", 1)
    plan = Plan(
        dp=row["gpus"] // (row["tp"] * row["pp"]),
        tp=row["tp"],
        pp=row["pp"],
        zero=3 if zero3 else 0,
        sequence_parallel=row.get("sequence_parallel", False),
        schedule="interleaved" if virtual_stages > 1 else "1f1b",
        virtual_stages=virtual_stages,
        micro_batch=row.get("micro_batch", 1),
        global_batch=row["batch"],
        recompute=row.get("recompute", "full"),
        dtype="fp16",
        grad_dtype="fp16",
        flash_attention=False,
        overlap=zero3,
    )
    cluster = replace(presets.cluster(table(name)["cluster"]), gpus=row["gpus"])
    return presets.model(row["model"]), cluster, plan


def step_from_tflops(model: Model, plan: Plan, tflops: float) -> float:
    """Seconds of a step at a published rate, which counts the recomputed forward pass (arXiv:2104.04473, eq. 3)."""
    layers = 4 * (model.forward_flops - model.head_flops)
    tokens = plan.global_batch * model.sequence
    return tokens * (layers + 3 * model.head_flops) / (plan.gpus * tflops * 1e12)
