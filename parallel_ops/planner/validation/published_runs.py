"""Published throughputs of systems of 2024 to 2026 (``runs/*.csv``), and their plans.

One row of a file is one run; ``runs/README.md`` has the columns and the source of each file. The same format serves for
runs of your own: ``parallel-ops validate --runs FILE``.
"""

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from typing import Any

from parallel_ops.planner import presets
from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.software import constants_of
from parallel_ops.planner.feasibility import problem, quick_memory_problem
from parallel_ops.planner.memory.recomputation import MODULES
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.precision import FORMATS
from parallel_ops.planner.presets.figures import figures
from parallel_ops.planner.step import step_seconds
from parallel_ops.planner.validation.measurement import Measurement, rows

_FOLDER = files("parallel_ops.planner.validation").joinpath("runs")


def published_runs(model: str = "") -> Iterator[Measurement]:
    """Every run of the files in this package; of one ``model``, if it is given."""
    for file in sorted(_FOLDER.iterdir(), key=lambda found: found.name):
        if file.name.endswith(".csv"):
            yield from runs(file.name, file.read_text(encoding="utf-8"), model)


def runs(name: str, text: str, model: str = "") -> Iterator[Measurement]:
    """The runs of a file.

    Args:
        name: of the file, for messages.
        text: its content. Lines that begin with # name the source.
        model: name of the only model whose runs are read; empty for all.

    Raises:
        ValueError: a column is missing, or a row has no such source, model, system or plan; names file and row.
    """
    lines = text.splitlines()
    source = " ".join(line.removeprefix("# ") for line in lines if line.startswith("#")) or name
    table = csv.DictReader([line for line in lines if not line.startswith("#")], restval="")
    for number, row in enumerate(table, start=1):
        try:
            _check(row)
            if model and row["model"] != model:
                continue
            yield _measurement(source, row)
        except KeyError as error:
            raise ValueError(f"{name}: no column {error}") from None
        except ValueError as error:
            raise ValueError(f"{name}, row {number}: {error}") from None


# Columns of whole numbers, with the least; 0 micro-batches and chunks are not given.
_COUNTS = {
    **dict.fromkeys(("gpus", "gbs", "seq", "replicate", "tp", "pp", "cp", "ep"), 1),
    **dict.fromkeys(("mbs", "vp", "zero"), 0),
}


def _system(source: str, release: str) -> dict[str, Any]:
    """``software`` and ``plan`` of a source, and ``fp8``, see ``runs/systems.json``."""
    systems = figures("validation/runs/systems")["systems"]
    found = [name for name in systems if source.startswith(name)]
    if not found:
        raise ValueError(f"runs: source must start with one of {', '.join(systems)}, got {source!r}")
    name = max(found, key=len)
    # Two digits of the year and of the month: 26.04.01.
    newer = name == "Megatron-Bridge" and release >= "26.04"
    return {**systems[name], **({"software": "megatron-bridge-2026"} if newer else {})}


def _check(row: dict[str, str]) -> None:
    for name, least in _COUNTS.items():
        if not re.fullmatch(r"\s*\d+\s*", row[name]) or int(row[name]) < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {row[name]!r}")
    figures = {name: row.get(name) or "0" for name in ("tokens_s_gpu", "tflops_gpu", "memory_gib")}
    for name, text in figures.items():
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be empty or a number of zero or more, got {text!r}")
    if not float(figures["tokens_s_gpu"]) and not float(figures["tflops_gpu"]):
        raise ValueError("needs the throughput of the run, tokens_s_gpu or tflops_gpu")


def _measurement(source: str, row: dict[str, str]) -> Measurement:
    model, cluster = _model(row), _cluster(row)
    system = _system(row["source"], row["release"])
    plan = _chosen(model, cluster, system, row)
    rate = float(row["tokens_s_gpu"] or 0)
    tokens = plan.global_batch * model.seq_length
    flops = 3 * tokens * model.forward_flops
    seconds = tokens / (rate * plan.gpus) if rate else flops / (float(row["tflops_gpu"]) * 1e12 * plan.gpus)
    held_out = tuple(figures("validation/runs/systems")["held_out"])
    return Measurement(
        source=source,
        table=row["source"],
        name=f"{row['release']}, {model.name} on {plan.gpus}, {plan.describe()}",
        model=model,
        cluster=cluster,
        plan=plan,
        seconds=seconds,
        software=system["software"],
        # Attention with sinks has kernels of its own, which no constant stands for.
        fitted=not (row["source"].startswith(held_out) or model.name.startswith("gpt-oss")),
        memory=float(row["memory_gib"]) if row["memory_gib"] else 0.0,
    )


def _model(row: dict[str, str]) -> Model:
    name, _, layers = row["model"].partition(":")
    model = replace(presets.model(name), seq_length=int(row["seq"]))
    if layers:
        model = replace(model, num_layers=int(layers), dense_layers=min(1, model.dense_layers))
    return replace(model, prediction_layers=1) if "with MTP" in row["note"] else model


def _cluster(row: dict[str, str]) -> Cluster:
    system, _, bandwidth = row["system"].partition(":")
    (name, _, node), gpus = system.partition("/"), int(row["gpus"])
    found = presets.cluster(name)
    found = replace(found, gpus=gpus, gpus_per_node=int(node or min(gpus, found.gpus_per_node)))
    return replace(found, inter=replace(found.inter, bandwidth=float(bandwidth) * 1e9)) if bandwidth else found


def _chosen(model: Model, cluster: Cluster, system: dict[str, Any], row: dict[str, str]) -> Plan:
    """The plan of a row; of micro-batches and chunks that are not given, the fastest that fit."""
    if int(row["pp"]) * int(row["vp"]) > model.num_layers:
        raise ValueError(f"pp * vp is {int(row['pp']) * int(row['vp'])} chunks of {model.num_layers} layers")
    if int(row["mbs"]) and int(row["vp"]):
        return _plan(model, system, row, int(row["mbs"]), int(row["vp"]))
    pp, layers = int(row["pp"]), model.num_layers
    chunks = [v for v in range(1, layers // pp + 1) if layers % (pp * v) == 0] if pp > 1 else [1]
    constants, best = constants_of(cluster, system["software"]), None
    for size in (1, 2, 4, 8) if row["mbs"] == "0" else (int(row["mbs"]),):
        for v in chunks if row["vp"] == "0" else (int(row["vp"]),):
            try:
                plan = _plan(model, system, row, size, v)
            except ValueError:
                continue
            if problem(model, cluster, plan) or quick_memory_problem(model, cluster, plan):
                continue
            seconds = step_seconds(model, cluster, plan, constants)
            if best is None or seconds < best[0]:
                best = seconds, plan
    if best is None:
        raise ValueError(f"no micro-batch of {row['model']} fits")
    return best[1]


def _plan(model: Model, system: dict[str, Any], row: dict[str, str], micro_batch: int, virtual_stages: int) -> Plan:
    sizes: dict[str, Any] = {name: int(row[name]) for name in ("tp", "pp", "cp", "ep", "zero")}
    tp, pp = sizes["tp"], sizes["pp"]
    made = Plan(
        **sizes,
        dp=int(row["gpus"]) // (tp * pp * sizes["cp"]),
        dp_replicate=int(row["replicate"]),
        expert_tp=1 if model.experts and tp > 1 else 0,
        sequence_parallel=tp > 1,
        schedule="interleaved" if virtual_stages > 1 else "1f1b",
        virtual_stages=virtual_stages,
        micro_batch=micro_batch,
        global_batch=int(row["gbs"]),
        recompute=_recompute(row),
        recompute_layers=_recomputed(model, row),
        offload="optimizer" if "offload" in row["flags"] else "none",
        dtype="mxfp8" if "MXFP8" in row["note"] or "FP8-MX" in row["note"] else row["dtype"],
        fused_ops="eager" not in row["flags"] and "ds" not in row["flags"].split(),
        fused_loss=False,
        ep_overlap="all-to-all overlapped" in row["note"],
        capacity_factor=1.0 if "tokendrop" in row["note"] else 0.0,
        tp_overlap="TP overlap off" not in row["note"],
        layers_per_chunk=_stages(model, pp * virtual_stages),
    )
    fp8 = system.get("fp8", {}) if made.dtype in FORMATS else {}
    return replace(made, **{**_launches(row), **system["plan"], **fp8})


def _stages(model: Model, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk with multi-token prediction: as many as fit evenly, and in the last, which has it, the rest
    (Megatron-Bridge, recipes/deepseek/h100/deepseek_v3.py)."""
    most = math.ceil(model.num_layers / chunks)
    rest = model.num_layers - most * (chunks - 1)
    return (*[most] * (chunks - 1), rest) if model.prediction_layers and chunks > 1 and rest >= 0 else ()


def _recompute(row: dict[str, str]) -> str:
    """``Plan.recompute`` of a row: the modules that its note names, "recompute layernorm and moe_act"."""
    named = re.search(r"recompute ([a-z_]+(?: and [a-z_]+)*)", row["note"])
    modules = named[1].split(" and ") if named else []
    if row["recompute"] == "selective" and modules and set(modules) <= set(MODULES):
        return "+".join(modules)
    listed = re.split(r"[,+\s]+", row["recompute"])
    if set(listed) <= set(MODULES):
        return "+".join(listed)
    return {"some": "full"}.get(row["recompute"], row["recompute"])


def _launches(row: dict[str, str]) -> dict[str, Any]:
    """CUDA graph, dispatcher and offloaded layers of a row: what its note says, else those of its recipe."""
    made: dict[str, Any] = {"cuda_graph": "none", "dispatcher": "all_to_all"}
    for recipe in rows("recipes")[1] if row["source"].startswith("Megatron-Bridge") else ():
        gpu, model = row["system"].partition(":")[0], row["model"].partition(":")[0]
        fits = recipe["model"] == model and gpu in (recipe["gpus"].split() or [gpu])
        fits = fits and recipe["dtype"] in ("", row["dtype"])
        if fits and recipe["from"] <= row["release"] <= recipe["until"]:
            made = {"cuda_graph": recipe["cuda_graph"], "dispatcher": recipe["dispatcher"]}
            if recipe["offload_layers"] and row["zero"] == "3":
                made |= {"offload": "activations", "offload_layers": int(recipe["offload_layers"])}
    named = [name for name in ("deepep", "hybridep") if name in row["note"].lower()]
    made |= {"dispatcher": named[0]} if named else {}
    made |= {"offload": "activations"} if "activations offloaded" in row["note"] else {}
    return made | ({"cuda_graph": "full"} if "full-iteration CUDA graph" in row["note"] else {})


def _recomputed(model: Model, row: dict[str, str]) -> int:
    """Layers that are recomputed in a run that recomputes some: every second one ("selective layer"), or as many as the
    published ratio of HFU and MFU, 1.24, says."""
    if row["recompute"] != "some":
        return 0
    return model.num_layers // 2 if "layer" in row["note"] else round(model.num_layers * 0.72)
