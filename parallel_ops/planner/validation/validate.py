"""Compares every published row with the planner."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from parallel_ops.planner import presets
from parallel_ops.planner.compute import work_of
from parallel_ops.planner.efficiency import efficiency
from parallel_ops.planner.estimate import estimate
from parallel_ops.planner.memory import layer_activations, memory
from parallel_ops.planner.model import Model
from parallel_ops.planner.passes import layer_costs
from parallel_ops.planner.placement import in_flight
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import GIB
from parallel_ops.planner.schedule import Times, actions, simulate
from parallel_ops.planner.validation.published import setting, step_from_tflops, table
from parallel_ops.planner.validation.report import Report, Row, Target, largest_error, mean_error

_EXACT = ("1f1b", "zb-h1", "zb-h2", "zb-1p")
_BUBBLES = (*_EXACT, "zb-2p", "interleaved")


def validate() -> Report:
    """The error table against every published table that the package ships, and whether its promises hold."""
    rows = (*_steps(), *_layers(), *_gains(), *_others(), *_memory(), *_activations(), *_states(), *_bubbles())
    report = Report(rows=rows, targets=())
    steps, held_out = report.select("step time"), report.select("step time", "held out")
    bubbles = {kind: [r for r in report.select("bubble") if f", {kind}," in r.name] for kind in _BUBBLES}
    exact = [row for kind in _EXACT for row in bubbles[kind]]
    formulas = (*report.select("model states"), *report.select("activations"))
    targets = (
        Target(name="step time: mean error", value=mean_error(steps), limit=0.10),
        Target(name="step time: mean error of the rows held out", value=mean_error(held_out), limit=0.10),
        Target(name="table 2: rows whose faster system is not the published one", value=_misordered(rows), limit=0),
        Target(
            name="gains: effects with the wrong sign",
            value=sum(row.predicted <= 1 for row in report.select("gain")),
            limit=0,
        ),
        Target(
            name="bubble: largest difference in 1F1B, ZB-H1, ZB-H2 and ZB-1p",
            value=max(abs(round(row.predicted, 4) - row.published) for row in exact),
            limit=0,
        ),
        Target(
            name="bubble: largest difference in ZB-2p",
            value=max(abs(row.predicted - row.published) for row in bubbles["zb-2p"]),
            limit=1.5e-4,
        ),
        Target(name="measured memory: largest error", value=largest_error(report.select("memory")), limit=0.10),
        Target(name="formulas of memory: largest error", value=largest_error(formulas), limit=0.005),
    )
    return Report(rows=rows, targets=targets)


def _row(name: str, part: str, row: str, quantity: str, unit: str, figures: tuple[float, float], role: str) -> Row:
    published, predicted = figures
    source = table(name)["source"]
    return Row(
        source=source,
        table=part,
        name=row,
        quantity=quantity,
        unit=unit,
        published=published,
        predicted=predicted,
        role=role,
    )


def _steps() -> Iterator[Row]:
    for name, part in (("megatron", "table 1"), ("megatron", "table 2"), ("recomputation", "table 5")):
        for row in table(name)[part]:
            model, cluster, plan = setting(name, row)
            predicted = estimate(model, cluster, plan).step
            published = row.get("seconds") or step_from_tflops(model, plan, row["tflops"])
            role = "fitted" if row.get("fitted") else "held out"
            yield _row(name, part, row["row"], "step time", "s", (published, predicted), role)


def _misordered(rows: tuple[Row, ...]) -> int:
    """Pairs of ZeRO-3 and PTD rows whose order by throughput is not the published one."""
    pairs = table("megatron")["table 2"]
    predicted = {row.name: row.published / row.predicted for row in rows if row.table == "table 2"}
    wrong = 0
    for zero3, ptd in zip(pairs[::2], pairs[1::2], strict=True):
        rates = [row["tflops"] * predicted[row["row"]] for row in (zero3, ptd)]
        wrong += (rates[0] < rates[1]) != (zero3["tflops"] < ptd["tflops"])
    return wrong


def _layers() -> Iterator[Row]:
    """One layer of the 22B model, forward and backward."""
    first = table("recomputation")["table 5"][0]
    for row in table("recomputation")["table 4"]:
        changes = {name: row[name] for name in ("sequence_parallel", "recompute")}
        model, cluster, plan = setting("recomputation", {**first, **changes})
        constants = efficiency(cluster.gpu.generation)
        compute, waits = layer_costs(model, cluster, cluster.gpu, constants, work_of(plan), sparse=False)
        passes = compute + waits
        for quantity, seconds in (("forward", passes.forward), ("backward", passes.input_grad + passes.weight_grad)):
            figures = row[quantity], seconds * 1e3
            yield _row("recomputation", "table 4", f"{row['row']}, {quantity}", "layer time", "ms", figures, "held out")


def _gains() -> Iterator[Row]:
    for row in table("megatron")["gains"]:
        model, cluster, plan = setting("megatron", row)
        without = {
            "fused_ops": replace(plan, fused_ops=False),
            "scatter_gather": replace(plan, scatter_gather=False),
            "interleaving": replace(plan, schedule="1f1b", virtual_stages=1),
        }[row["kind"]]
        predicted = estimate(model, cluster, without).step / estimate(model, cluster, plan).step
        found = _row("megatron", "gains", row["row"], "gain", "x", (row["gain"], predicted), "held out")
        yield replace(found, bound=row.get("bound", ""))


def _others() -> Iterator[Row]:
    """Newer GPUs, with the constants of Ampere."""
    for row in table("other_generations")["llama 3"]:
        plan = Plan(
            dp=row["dp"],
            tp=8,
            pp=16,
            zero=1,
            sequence_parallel=True,
            schedule="interleaved",
            virtual_stages=4,
            global_batch=2048,
        )
        found = estimate(presets.model("llama3-405b"), presets.cluster(f"h100x{row['gpus']}"), plan)
        figures = row["tflops"], found.tflops_per_gpu
        yield _row("other_generations", "llama 3", row["row"], "other GPUs", "TFLOP/s", figures, "held out")
    for row in table("other_generations")["deepseek-v3"]:
        plan = Plan(
            dp=row["dp"],
            pp=16,
            ep=64,
            zero=1,
            schedule="dualpipe-v",
            virtual_stages=2,
            global_batch=15360,
            recompute="selective",
            dtype="fp8",
        )
        found = estimate(presets.model("deepseek-v3"), presets.cluster(f"h800x{row['gpus']}"), plan)
        hours = found.days(14.8e12) * 24 * row["gpus"] / 1e6
        figures = row["gpu_hours"], hours
        yield _row(
            "other_generations", "deepseek-v3", row["row"], "other GPUs", "million GPU-hours", figures, "held out"
        )


def _activations() -> Iterator[Row]:
    for row in table("recomputation")["figure 1"]:
        model, _, plan = setting("recomputation", {**row, "recompute": "none"})
        sharded = replace(plan, sequence_parallel=True, recompute="selective")
        for kind, variant in (("baseline", plan), ("sharded", sharded)):
            layers = in_flight(variant, 0) * model.layers / variant.pp
            kept = layers * layer_activations(model, variant, False) * model.sequence * variant.micro_batch
            figures = row[kind], kept / GIB
            yield _row("recomputation", "figure 1", f"{row['row']}, {kind}", "activations", "GiB", figures, "computed")


def _memory() -> Iterator[Row]:
    for row in table("zero_bubble")["table 4"]:
        model = Model(
            name=row["model"],
            layers=row["layers"],
            hidden=row["hidden"],
            heads=row["heads"],
            vocab=50304,
            sequence=1024,
        )
        for kind, measured in row["gigabytes"].items():
            plan = _zero_bubble_plan(row, kind)
            # Measured by the allocator, which does not see what the driver and NCCL hold.
            predicted = max(stage.total - stage.runtime for stage in memory(model, plan)) / 1e9
            yield _row(
                "zero_bubble", "table 4", f"{row['model']}, {kind}", "memory", "GB", (measured, predicted), "held out"
            )


def _zero_bubble_plan(row: dict[str, Any], kind: str) -> Plan:
    pp, layers = row["pp"], row["layers"]
    virtual_stages = _virtual_stages(row, kind)
    chunks = pp * virtual_stages
    each = (layers + 2) // chunks
    return Plan(
        pp=pp,
        schedule=kind,
        virtual_stages=virtual_stages,
        micro_batch=row["micro_batch"],
        global_batch=row["micro_batch"] * row["micro_batches"],
        grad_dtype="bf16",
        flash_attention=False,
        layers_per_chunk=(each - 1, *[each] * (chunks - 2), each - 1),
    )


def _states() -> Iterator[Row]:
    model = presets.model("gpt3-175b")
    for row in table("zero")["table 1"]:
        for zero, published in enumerate(row["gigabytes"], start=1):
            plan = Plan(dp=row["ranks"], zero=zero, global_batch=row["ranks"], grad_dtype="bf16")
            # States are proportional to the parameters, so any model stands for one of this size.
            states = memory(model, plan)[0].states / model.parameters * row["parameters"] / 1e9
            name = f"{row['parameters'] / 1e9:g}B on {row['ranks']}, ZeRO-{zero}"
            # The table is printed with up to three digits.
            digits = _digits(published)
            figures = published, round(states, digits)
            yield _row("zero", "table 1", name, "model states", "GB", figures, "computed")


def _digits(published: float) -> int:
    text = f"{published:g}"
    return len(text.partition(".")[2])


def _bubbles() -> Iterator[Row]:
    for row in table("zero_bubble")["table 5"]:
        times = Times(
            forward=row["forward"],
            input_grad=row["input_grad"],
            weight_grad=row["weight_grad"],
            link=row["link"],
        )
        sizes = next(sizes for sizes in table("zero_bubble")["table 4"] if sizes["model"] == row["model"])
        for kind, published in row["bubble"].items():
            predicted = _bubble(kind, row["pp"], row["micro_batches"], times, sizes)
            name = f"{row['model']}, {kind}, {row['micro_batches']} micro-batches"
            yield _row("zero_bubble", "table 5", name, "bubble", "", (published, predicted), "computed")


def _bubble(kind: str, pp: int, micro_batches: int, times: Times, sizes: dict[str, Any]) -> float:
    if kind in ("zb-1p", "zb-2p"):
        # What a layer keeps of its activations from I to W, of the paper's table 3; the sequence is 1,024.
        retained = 32 / (34 + 5 * sizes["heads"] * 1024 / sizes["hidden"])
        limit = (1 if kind == "zb-1p" else 2) * pp
        order = actions("zb-2p", pp, micro_batches, times=times, memory_limit=limit, retained=retained)
    else:
        v = _virtual_stages(sizes, kind)
        passes = {name: getattr(times, name) / v for name in ("forward", "input_grad", "weight_grad")}
        order, times = actions(kind, pp, micro_batches, v), replace(times, **passes)
    return simulate(order, times).bubble_without_barrier


def _virtual_stages(sizes: dict[str, Any], kind: str) -> int:
    """Interleaved, one layer a chunk; the first and the last stage have a layer less."""
    layers: int = sizes["layers"] + 2
    return layers // sizes["pp"] if kind == "interleaved" else 1
