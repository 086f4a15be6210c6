"""The published tables and the plans of their rows. Assumptions beyond a table are stated with their reason."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from parallel_ops.planner import presets
from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.validation.large_runs import deepseek, llama, titan
from parallel_ops.planner.validation.measurement import Measurement, rows, table
from parallel_ops.planner.validation.published_runs import published_runs


@functools.cache
def measurements() -> tuple[Measurement, ...]:
    """Every measured step time in the package."""
    return (
        *_megatron(),
        *_vtrain("vtrain_single"),
        *_vtrain("vtrain_multi"),
        *_foundry(),
        *_zero_bubble(),
        *titan(),
        *llama(),
        *deepseek(),
        *published_runs(),
    )


# Plans of the systems of 2021.
_OF_2021: dict[str, Any] = {
    "recompute": "full",
    "dtype": "fp16",
    "grad_dtype": "fp16",
    "fsdp": False,
    "flash_attention": False,
}


def _setting(row: dict[str, Any]) -> tuple[Model, Cluster, Plan]:
    """Model, cluster and plan of a row of Megatron-LM's tables.

    Both systems of that time kept 16-bit gradients and stored attention scores; only ZeRO-3 overlapped data-parallel
    communication. DeepSpeed's ZeRO-3 gathered parameter by parameter: its rings reached the rate of one adapter.
    """
    zero3 = row.get("system") == "zero3"
    virtual_stages = row.get("virtual_stages", 1)
    plan = Plan(
        dp=row["gpus"] // (row["tp"] * row["pp"]),
        tp=row["tp"],
        pp=row["pp"],
        zero=3 if zero3 else 0,
        gather_parameters=zero3,
        schedule="interleaved" if virtual_stages > 1 else "1f1b",
        virtual_stages=virtual_stages,
        micro_batch=row.get("micro_batch", 1),
        global_batch=row["batch"],
        overlap=zero3,
        **_OF_2021,
    )
    cluster = replace(presets.cluster(table("megatron")["cluster"]), gpus=row["gpus"], rails=1 if zero3 else 0)
    return presets.model(row["model"]), cluster, plan


def _megatron() -> Iterator[Measurement]:
    for part in ("table 1", "table 2"):
        for row in table("megatron")[part]:
            model, cluster, plan = _setting(row)
            # The published rate counts the recomputed forward pass (arXiv:2104.04473, eq. 3).
            flops = 4 * (model.forward_flops - model.head_flops) + 3 * model.head_flops
            yield Measurement(
                source=table("megatron")["source"],
                table=part,
                name=row["row"],
                model=model,
                cluster=cluster,
                plan=plan,
                seconds=plan.global_batch * model.seq_length * flops / (plan.gpus * row["tflops"] * 1e12),
                software="fsdp-2023" if row.get("system") == "zero3" else "megatron-2021",
            )


def _vtrain(name: str) -> Iterator[Measurement]:
    """GPT with full recomputation in fp16, by the Megatron-LM of that time."""
    source, found = rows(name)
    single = name == "vtrain_single"
    for row in found:
        layers, hidden = int(row["# layers"]), int(row["hidden size"])
        tp, dp, pp = (int(row[f"{kind} parallelism"]) for kind in ("tensor", "data", "pipeline"))
        model = Model(
            name=f"gpt-{hidden}x{layers}",
            num_layers=layers,
            hidden_size=hidden,
            num_heads=int(row["attention heads"]),
            # The rows with tp = 1 on one node spend four times as long in the head as those with tp = 2: as if the
            # vocabulary of GPT-2 were padded for tensor parallelism alone.
            vocab_size=51200 if not single else 50257 if tp == 1 else 50304,
            seq_length=int(row["sequence length"]),
        )
        gpus, micro_batch, batch = tp * dp * pp, int(row["micro batch"]), int(row["global batch"])
        system = presets.cluster("a100-80")
        yield Measurement(
            source=source,
            table="2 to 8 GPUs" if single else "64 to 512 GPUs",
            name=f"{hidden}x{layers}, batch {batch}: dp{dp} tp{tp} pp{pp} b{micro_batch}",
            model=model,
            cluster=replace(system, gpus=gpus, inter=replace(system.inter, bandwidth=12.5e9)),
            plan=Plan(dp=dp, tp=tp, pp=pp, micro_batch=micro_batch, global_batch=batch, overlap=False, **_OF_2021),
            seconds=float(row["iteration time (ms)"]) / 1e3,
            group=f"{name} {hidden}x{layers} {gpus} {batch}",
        )


def _foundry() -> Iterator[Measurement]:
    """MPT in eager PyTorch under FSDP. ``DEFAULT`` reduces gradients in fp32, ``PURE`` in bf16."""
    source, found = rows("foundry")
    for row in found:
        shape = table("mpt")["models"][row["Model"]] | table("mpt")["of all"]
        model = Model(name=f"mpt-{row['Model']}", seq_length=int(row["SeqLen (T)"]), **shape)
        gpus, batch = int(row["# GPUs"]), int(row["GlobalBatchSize"])
        kind = {"h100_80gb": "h100", "a100_80gb": "a100-80", "a100_40gb": "a100-40"}[row["GPU"]]
        plan = Plan(
            dp=gpus,
            zero=2 if row["Sharding Strategy"] == "SHARD_GRAD_OP" else 3,
            micro_batch=int(row["MicroBatchSize"]),
            global_batch=batch,
            recompute="full" if row["Activation Checkpointing"] == "True" else "none",
            dtype="fp8" if row["Precision"] == "amp_fp8" else "bf16",
            grad_dtype="fp32" if row["MP Mode"] == "DEFAULT" else "bf16",
            fused_ops=False,
            inplace_loss=True,  # loss_fn: fused_crossentropy in the same configurations
        )
        name = f"{row['Model']}, {row['SeqLen (T)']} tokens, {gpus} GPUs, b{plan.micro_batch} x {plan.micro_batches}"
        yield Measurement(
            source=source,
            table=f"{kind} fp8" if plan.dtype == "fp8" else kind,
            name=name,
            model=model,
            cluster=presets.cluster(f"{kind}x{gpus}"),
            plan=plan,
            seconds=batch * model.seq_length / float(row["Throughput (T/s)"]),
            software="fsdp-2023",
            group=f"foundry {kind} {plan.dtype} {row['Model']} {row['SeqLen (T)']} {gpus}",
        )


def zero_bubble_setting(row: dict[str, Any], kind: str, micro_batches: int) -> tuple[Model, Plan]:
    """Model and plan of a row of Zero Bubble's table 4. Interleaved, one layer a chunk; the first and the last stage
    have a layer less."""
    sizes = {name: row[name] for name in ("num_layers", "hidden_size", "num_heads")}
    model = Model(name=row["model"], **sizes, vocab_size=50304, seq_length=1024)
    virtual_stages = (row["num_layers"] + 2) // row["pp"] if kind == "interleaved" else 1
    chunks = row["pp"] * virtual_stages
    each = (row["num_layers"] + 2) // chunks
    plan = Plan(
        pp=row["pp"],
        schedule=kind,
        virtual_stages=virtual_stages,
        micro_batch=row["micro_batch"],
        global_batch=row["micro_batch"] * micro_batches,
        grad_dtype="bf16",
        flash_attention=False,
        optimizer_barrier=not kind.startswith("zb"),  # post-validation, section 4 of the paper
        layers_per_chunk=(each - 1, *[each] * (chunks - 2), each - 1),
    )
    return model, plan


def _zero_bubble() -> Iterator[Measurement]:
    for row in table("zero_bubble")["table 4"]:
        for micro_batches, rates in row["rates"].items():
            for kind, rate in zip(row["gigabytes"], rates, strict=True):
                model, plan = zero_bubble_setting(row, kind, int(micro_batches))
                yield Measurement(
                    source=table("zero_bubble")["source"],
                    table="zero bubble table 4",
                    name=f"{row['model']}, {kind}, {micro_batches} micro-batches",
                    model=model,
                    cluster=replace(presets.cluster("a100-80"), gpus=plan.pp),
                    plan=plan,
                    seconds=plan.global_batch / (rate * plan.pp),
                    group=f"zero bubble {row['model']} {micro_batches}",
                    fitted=False,
                )
