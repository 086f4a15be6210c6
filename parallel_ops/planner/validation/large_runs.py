"""Runs of Llama 3.1 with torchtitan, of Llama 3 405B and of DeepSeek-V3, and their plans."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from parallel_ops.planner import presets
from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.validation.measurement import Measurement, table


def titan_setting(row: dict[str, Any]) -> tuple[Model, Cluster, Plan]:
    """Model, cluster and plan of a row of torchtitan's tables."""
    sizes = {name: row.get(name, 1) for name in ("dp", "tp", "pp", "cp", "virtual_stages", "micro_batch")}
    model = presets.model(row["model"])
    plan = Plan(
        **sizes,
        zero=2 if sizes["pp"] > 1 else 3,
        sequence_parallel=sizes["tp"] > 1,
        schedule="interleaved" if sizes["virtual_stages"] > 1 else "1f1b",
        global_batch=sizes["dp"] * sizes["micro_batch"] * row.get("micro_batches", 1),
        recompute=row["recompute"],
        dtype=row["dtype"],
        fused_ops=row["fused"],
    )
    model = replace(model, seq_length=row.get("seq_length", model.seq_length))
    return model, replace(presets.cluster("h100-96"), gpus=plan.gpus), plan


def titan() -> Iterator[Measurement]:
    """Step times of Llama 3.1 with torchtitan."""
    for row in table("torchtitan")["rows"]:
        model, cluster, plan = titan_setting(row)
        yield Measurement(
            source=table("torchtitan")["source"],
            table="torchtitan",
            name=f"table {row['table']}, {row['model']}, {model.seq_length} tokens: {plan.describe()}",
            model=model,
            cluster=cluster,
            plan=plan,
            seconds=plan.global_batch * model.seq_length / (row["rate"] * plan.gpus),
            software="torchtitan-2025",
        )


def llama() -> Iterator[Measurement]:
    """Step times of Llama 3 405B, from the published TFLOP/s per GPU."""
    for row in table("other_generations")["llama 3"]:
        shared = {**table("other_generations")["plans"]["llama 3"], "layers_per_chunk": (0, *[1] * 126, 0)}
        plan = Plan(**shared, dp=row["dp"], cp=row["cp"], global_batch=row["batch"])
        model = replace(presets.model("llama3-405b"), seq_length=row["seq_length"])
        flops = 3 * row["batch"] * model.seq_length * model.forward_flops
        yield Measurement(
            source=table("other_generations")["source"],
            table="llama 3",
            name=row["row"],
            model=model,
            cluster=replace(presets.cluster("llama3-cluster"), gpus=row["gpus"]),
            plan=plan,
            seconds=flops / (row["tflops"] * 1e12 * row["gpus"]),
            software="megatron-2024",
        )


def deepseek() -> Iterator[Measurement]:
    """The mean step time of DeepSeek-V3's pre-training, from its GPU hours."""
    for row in table("other_generations")["deepseek-v3"]:
        plan = Plan(**table("other_generations")["plans"]["deepseek-v3"], dp=row["dp"])
        model = presets.model("deepseek-v3")
        steps = 14.8e12 / (plan.global_batch * model.seq_length)
        yield Measurement(
            source=table("other_generations")["source"],
            table="deepseek-v3",
            name=row["row"],
            model=model,
            cluster=replace(presets.cluster("deepseek-v3-cluster"), gpus=row["gpus"]),
            plan=plan,
            software="megatron-bridge-2025",  # kernels and communication of their own, as good as today's
            seconds=row["gpu_hours"] * 1e6 * 3600 / row["gpus"] / steps,
            fitted=False,
        )
