"""The worked scenarios of ``docs/planner.md``: tables between ``<!-- name -->`` marks, made by the code.

``python -m support.planning.planner_scenarios`` from ``tests/`` writes them; ``test_docs.py`` and
``test_validation.py`` in ``tests/planner`` compare.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from parallel_ops.planner import (
    Cluster,
    Estimate,
    Model,
    Plan,
    SearchOptions,
    SearchResult,
    estimate,
    memory,
    presets,
    search,
)
from parallel_ops.planner.compute.software import era, eras
from parallel_ops.planner.error_band import error_band
from parallel_ops.planner.results import GIB
from parallel_ops.planner.validation import Report, validate
from parallel_ops.planner.validation.measurement import Measurement
from parallel_ops.planner.validation.published_runs import published_runs
from parallel_ops.planner.validation.refits import without_own_table
from parallel_ops.planner.validation.validate import PROMISES, memory_rows

DOCUMENT = Path(__file__).parents[3] / "docs" / "planner.md"
# Schedules that users have at hand; without those that the search of a large cluster would only be slower for.
USUAL = SearchOptions(
    schedules=("1f1b", "interleaved", "zb-v"), zero=(1, 3), sequence_parallel=(True,), cp_kinds=("ring",)
)


def table(header: str, rows: list[list[str]]) -> str:
    columns = header.split("|")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.strip() for cell in line) + " |" for line in lines)


def plan_row(found: Estimate) -> list[str]:
    return [
        found.plan.describe(),
        f"{found.step:.3g} ± {found.step * found.error_band.time:.2g}",
        f"{found.tflops_per_gpu:.0f} ± {found.tflops_per_gpu * found.error_band.time:.0f}",
        f"{found.mfu:.1%}",
        f"{found.peak_memory.total / GIB:.1f} ± {found.peak_memory.total * found.error_band.memory / GIB:.1f}",
        f"{found.bubble_fraction:.1%}",
        f"{found.exposed / found.step:.1%}",
    ]


PLAN_HEADER = "plan|step, s|TFLOP/s a GPU|MFU|GiB|bubble|exposed communication"


def outcome(found: SearchResult, count: int = 3) -> str:
    """The fastest plans that differ in more than ties, and why others were rejected."""
    chosen: list[Estimate] = []
    for one in found.plans:
        if all(abs(one.step / other.step - 1) > 1e-3 for other in chosen):
            chosen.append(one)
    reasons = ", ".join(f"{kind} {count}" for kind, count in list(found.reasons().items())[:4])
    decisive = [row.constant for row in found.sensitivity if row.changes]
    ties = f" {found.ties} of the {len(found.plans)} fastest are ties." if found.ties > 1 else ""
    if found.misses:
        miss = found.misses[0]
        ties += f" {1 - miss.seconds / found.best.step:.1%} faster, with {miss.excess / GIB:.1f} GiB too much memory: "
        ties += f"{miss.plan.describe()}."
    hangs = f"a 20 % error of {' or '.join(decisive)} would change" if decisive else "no 20 % error would change"
    return "\n".join(
        [
            table(PLAN_HEADER, [plan_row(one) for one in chosen[:count]]),
            "",
            f"{len(found.ranking):,} plans run, {len(found.rejected):,} do not ({reasons}). Of the constants, {hangs} "
            f"the choice.{ties}",
        ]
    )


FOUND: dict[tuple[str, str, int, int, str], SearchResult] = {}


def best(model: Model, cluster: Cluster, batch: int, options: SearchOptions = USUAL) -> SearchResult:
    """A search, done once."""
    key = model.name, cluster.name, model.seq_length, batch, repr(options)
    if key not in FOUND:
        FOUND[key] = search(model, cluster, batch=batch, options=options, keep=8)
    return FOUND[key]


def searched(
    model: str, cluster: str, batch: int, options: SearchOptions = USUAL, sequence: int = 0
) -> Callable[[], str]:
    shape = presets.model(model)
    shape = replace(shape, seq_length=sequence) if sequence else shape
    return lambda: outcome(best(shape, presets.cluster(cluster), batch, options))


def seventy_billion() -> str:
    """Model states of ZeRO-1, 2 and 3 by data parallelism alone, and the best plan of all."""
    model = presets.model("llama3-70b")
    rows = []
    for gpus in (16, 32, 64):
        states = [memory(model, Plan(dp=gpus, zero=zero, global_batch=512))[0].states / GIB for zero in (1, 2, 3)]
        found = best(model, presets.cluster(f"a100-80x{gpus}"), 512, OFFLOADED).best
        rows.append(
            [
                str(gpus),
                *(f"{size:.0f}" for size in states),
                found.plan.describe(),
                f"{found.peak_memory.total / GIB:.1f}",
                f"{found.step:.3g}",
                f"{found.mfu:.1%}",
            ]
        )
    return table("GPUs|ZeRO-1, GiB|ZeRO-2, GiB|ZeRO-3, GiB|best plan|GiB|step, s|MFU", rows)


OFFLOADED = replace(USUAL, offload=("none", "optimizer"))


def data_parallel_limits() -> str:
    """One model, one batch, more and more data-parallel ranks."""
    model, batch = presets.model("llama3-8b"), 512
    rows = []
    first = 0.0
    for gpus in (8, 32, 128, 512):
        plan = Plan(dp=gpus, zero=1, global_batch=batch, recompute="selective", fused_loss=True)
        found = estimate(model, presets.cluster(f"h100x{gpus}"), plan)
        rate = found.tokens_per_second / gpus
        first = first or rate
        rows.append(
            [
                str(gpus),
                str(plan.micro_batches),
                f"{found.step:.3g}",
                f"{found.tokens_per_second / 1e3:,.0f}",
                f"{rate / first:.0%}",
                f"{found.exposed / found.step:.1%}",
            ]
        )
    rows.append(["1,024", "", "", "", "", "no: 512 sequences cannot be divided"])
    return table("GPUs|micro-batches|step, s|thousand tokens/s|efficiency|exposed communication", rows)


def two_generations() -> str:
    """The same number of GPUs, of one kind and of two, with even and with balanced stages."""
    model = presets.model("llama3-70b")
    rows = []
    for name in ("a100-80x64", "a100-80x32+h100x32", "h100x64"):
        found = best(model, presets.cluster(name), 512, OFFLOADED).best
        layers = found.plan.layers_per_chunk
        sizes = "/".join(map(str, layers)) if layers else "even"
        rows.append([name, found.plan.describe(), sizes, f"{found.step:.3g}", f"{found.mfu:.1%}"])
    mixed = presets.cluster("a100-80x32+h100x32")
    balanced = best(model, mixed, 512, OFFLOADED).best.plan
    even = estimate(model, mixed, replace(balanced, layers_per_chunk=()))
    rows.append(["a100-80x32+h100x32", "the same", "even", f"{even.step:.3g}", f"{even.mfu:.1%}"])
    return table("cluster|plan|layers of the stages|step, s|MFU", rows)


@cache
def report() -> Report:
    return validate()


def validation() -> str:
    """The errors of each quantity of each published table, and the promise that each table of step times is held to."""
    rows = []
    for found in report().summaries():
        promise = PROMISES[found.table] if found.quantity == "step time" else None
        rows.append(
            [
                f"{SHORT.get(found.source[:12], '')} {found.table}".strip(),
                found.quantity,
                str(found.rows),
                str(found.fitted),
                f"{found.mean:.1%}",
                f"{found.bias:+.1%}",
                f"{found.largest:+.1%}",
                f"{promise:.0%}" if promise else "",
            ]
        )
    return table("table|quantity|rows|of these fitted|mean error|bias|largest|mean promised", rows)


def memory_parts() -> str:
    """The parts of the memory of SimuMax's runs, beside the measured one."""
    rows = []
    for row in memory_rows():
        if row.table.startswith("SimuMax"):
            figures = f"{row.published:.2f}", f"{row.predicted:.2f}", f"{row.error:+.1%}"
            rows.append([row.name.partition(", ")[2], *figures, *(f"{value:.2f}" for value in row.parts.values())])
    return table(f"run|measured|estimate|error|{'|'.join(row.parts)}", rows)


def trust() -> str:
    """The errors of step times by software, GPU and year, of fits with and without each row's table, and the bands."""
    found: dict[tuple[str, str, str], list[tuple[Measurement, float]]] = {}
    for row, without in without_own_table():
        for key in ((row.software, GPU_NAMES[row.cluster.gpu.name], year(row)), ("all", "", year(row))):
            found.setdefault(key, []).append((row, without))
    rows = []
    for (software, gpu, of_year), each in sorted(found.items(), key=lambda item: (item[0][0] == "all", item[0])):
        errors = [row.predicted(exact=False) / row.seconds - 1 for row, _ in each]
        without = [predicted / row.seconds - 1 for row, predicted in each]
        widths = {
            error_band(row.cluster, row.plan, software=row.software, experts=row.model.expert_kind).time
            for row, _ in each
        }
        kinds = "experts" if all(row.model.experts for row, _ in each) else "dense"
        kinds = "dense, experts" if kinds == "dense" and any(row.model.experts for row, _ in each) else kinds
        mean, bias, left_out = (
            sum(map(abs, errors)) / len(each),
            sum(errors) / len(each),
            sum(map(abs, without)) / len(each),
        )
        band = f"{min(widths):.0%}" if len(widths) == 1 else f"{min(widths):.0%} to {max(widths):.0%}"
        figures = f"{mean:.1%}", f"{bias:+.1%}", f"{left_out:.1%}", f"± {band}"
        name = f"`{software}`" if gpu else software
        rows.append([name, gpu, of_year, kinds, str(len(each)), *figures])
    return table("software|GPU|year|models|rows|mean error|bias|its table left out|band", rows)


# Years of the tables whose rows do not begin with a release.
YEARS = {
    "table 1": "2021",
    "table 2": "2021",
    "torchtitan": "2024",
    "llama 3": "2024",
    "deepseek-v3": "2024",
    "SimuMax B200": "2026",
    "SimuMax B200 MoE": "2026",
    "SimuMax B200 long": "2026",
}


@cache
def _released() -> frozenset[str]:
    return frozenset(run.table for run in published_runs())


def year(row: Measurement) -> str:
    """The year of a run: that of its release ("26.04", "2024-07"), or of its table."""
    if row.table in YEARS:
        return YEARS[row.table]
    release = row.name.partition(",")[0] if row.table in _released() else "2023"
    return release[:4] if release.startswith("20") else f"20{release[:2]}"


# The GPUs of published rows, as one writes them.
GPU_NAMES = {
    "a100-40": "A100",
    "a100-80": "A100",
    "a800": "A800",
    "b200": "B200",
    "b300": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
    "h100": "H100",
    "h100-96": "H100, 500 W",
    "h200": "H200",
    "h800": "H800",
    "tpu-v4": "TPU v4",
    "tpu-v6e": "TPU v6e",
    "tpu-v5p": "TPU v5p",
    "v100": "V100",
}


def software() -> str:
    """The eras of software."""
    return table("`--software`|what it stands for", [[f"`{name}`", era(name).about] for name in eras()])


# The sources of the tables, by how these begin.
SHORT = {
    "Narayanan et": "arXiv:2104.04473,",
    "Qi et al., Z": "arXiv:2401.10241,",
    "Llama team, ": "arXiv:2407.21783 and 2412.19437,",
    "Iteration ti": "vTrain,",
    "Training thr": "llm-foundry,",
    "torchtitan, ": "torchtitan, H100 of 500 W,",
}


def long_context() -> str:
    """One model, 4M tokens a step, in ever longer sequences."""
    shape, cluster = presets.model("llama3-8b"), presets.cluster("h100x64")
    rows = []
    for sequence in (2**17, 2**18, 2**19, 2**20):
        found = best(replace(shape, seq_length=sequence), cluster, 2**22 // sequence, LONG)
        reasons = ", ".join(f"{kind} {count}" for kind, count in list(found.reasons().items())[:2])
        one = found.best
        kind = one.plan.cp_kind if one.plan.cp > 1 else ""
        rows.append([f"{sequence:,}", str(one.plan.cp), kind, *plan_row(one), reasons])
    return table(f"tokens|CP|kind|{PLAN_HEADER}|why others do not run", rows)


LONG = SearchOptions(schedules=("1f1b",), zero=(1, 3), micro_batches=(1,), offload=("none",))


SMALL_CARDS = SearchOptions(micro_batches=(1, 2, 4))
# States as in the published run, which none of the known systems runs with its schedule.
EXPERTS = SearchOptions(
    schedules=("1f1b", "dualpipe-v"),
    zero=(1,),
    micro_batches=(1, 2),
    offload=("none",),
    sequence_parallel=(True,),
    base=Plan(fused_loss=True, dtype="fp8", activation_dtype="fp8", moment_dtype="bf16"),
    any_system=True,
)

SCENARIOS: dict[str, Callable[[], str]] = {
    "7b-on-8": searched("llama2-7b", "a100-80x8", 1024),
    "13b-on-24gb": searched("llama2-13b", "rtx3090x8", 512, SMALL_CARDS),
    "70b": seventy_billion,
    "175b-on-128": searched("gpt3-175b", "a100-80x128", 1536),
    "180b-on-128": searched("falcon-180b", "h100x128", 2048),
    "405b-8k": searched("llama3-405b", "llama3-cluster", 2048),
    "405b-128k": searched("llama3-405b", "llama3-cluster", 128, USUAL, 131072),
    "deepseek-v3": searched("deepseek-v3", "deepseek-v3-cluster", 15360, EXPERTS),
    "data-parallel-limits": data_parallel_limits,
    "two-generations": two_generations,
    "software": software,
    "validation": validation,
    "trust": trust,
    "memory-parts": memory_parts,
    "long-context": long_context,
}


def check_table(name: str) -> None:
    """Raises ``AssertionError`` unless the table ``name`` of the document is what the code makes."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- end -->", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    assert found[1] == SCENARIOS[name](), "run: cd tests && python -m support.planning.planner_scenarios"


def regenerate(text: str) -> str:
    """The document with every table made anew."""
    for name, make in SCENARIOS.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not mark.search(text):
            raise ValueError(f"docs/planner.md has no place for {name}")
        made = make()
        text = mark.sub(lambda found, made=made: f"{found[1]}{made}\n{found[2]}", text)
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(regenerate(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
