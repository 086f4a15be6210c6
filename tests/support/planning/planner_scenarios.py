"""The worked scenarios of ``docs/planner.md``: tables between ``<!-- name -->`` marks, made by the code.

``python -m support.planning.planner_scenarios`` from ``tests/`` writes them; ``test_docs.py`` and
``test_validation.py`` in ``tests/planner`` compare.
"""

import re
from collections.abc import Callable
from dataclasses import replace
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
from parallel_ops.planner.results import GIB
from support.planning.planner_errors import memory_parts, table, trust, validation

DOCUMENT = Path(__file__).parents[3] / "docs" / "planner.md"
# Schedules that users have at hand; without those that the search of a large cluster would only be slower for.
USUAL = SearchOptions(
    schedules=("1f1b", "interleaved", "zb-v"), zero=(1, 3), sequence_parallel=(True,), cp_kinds=("ring",)
)


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


def software() -> str:
    """The eras of software."""
    return table("`--software`|what it stands for", [[f"`{name}`", era(name).about] for name in eras()])


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
        made = make()
        text = mark.sub(lambda found, made=made: f"{found[1]}{made}\n{found[2]}", text)
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(regenerate(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
