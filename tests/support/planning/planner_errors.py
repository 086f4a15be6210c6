"""The tables of ``docs/planner.md`` about published figures: their errors, the parts of a memory, bands."""

from functools import cache

from parallel_ops.planner.error_band import error_band
from parallel_ops.planner.validation import Report, validate
from parallel_ops.planner.validation.measurement import Measurement
from parallel_ops.planner.validation.published_runs import published_runs
from parallel_ops.planner.validation.refits import without_own_table
from parallel_ops.planner.validation.validate import PROMISES, memory_rows


def table(header: str, rows: list[list[str]]) -> str:
    columns = header.split("|")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.strip() for cell in line) + " |" for line in lines)


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


# The sources of the tables, by how these begin.
SHORT = {
    "Narayanan et": "arXiv:2104.04473,",
    "Qi et al., Z": "arXiv:2401.10241,",
    "Llama team, ": "arXiv:2407.21783 and 2412.19437,",
    "vTrain: iter": "vTrain,",
    "llm-foundry:": "llm-foundry,",
    "torchtitan, ": "torchtitan, H100 of 500 W,",
}
