"""The commands of ``parallel-ops``."""

import atexit
import gc
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from parallel_ops._internal.command_line import fail, processors, run, waiting
from parallel_ops.planner import presets
from parallel_ops.planner.cli import comparison, error_tables, inputs, json_data, options, tables, workload
from parallel_ops.planner.cli.schedule import schedule_command
from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.software import CURRENT, era, eras
from parallel_ops.planner.estimate import estimate as estimate_plan
from parallel_ops.planner.export import TARGETS, find_target
from parallel_ops.planner.export import export as export_plan
from parallel_ops.planner.export.launcher import script
from parallel_ops.planner.export.trainer import TRAINER
from parallel_ops.planner.feasibility import memory_problem
from parallel_ops.planner.model import Model
from parallel_ops.planner.precision import FORMATS
from parallel_ops.planner.results import Estimate
from parallel_ops.planner.search.options import SearchOptions
from parallel_ops.planner.search.result import SearchResult
from parallel_ops.planner.search.search import search
from parallel_ops.planner.training_run import expected
from parallel_ops.planner.validation import validate
from parallel_ops.planner.validation.published_runs import runs as read_runs

# Exit code if the plan does not fit, no plan fits, or a promise is broken. 2 is for bad input.
NO = 1

app = typer.Typer(pretty_exceptions_enable=False)


def main() -> None:
    """Runs the command line. A user's error is one line on stderr and exit code 2."""
    if sys.argv[1:2] == ["config"]:
        fail(
            "config is now an option of two commands: plan --for SYSTEM --output FILE writes the fastest plan, "
            "estimate --plan FIELDS --for SYSTEM --output FILE a given one; FILE may be -"
        )
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        run(app, "parallel-ops", errors=(ValueError, TypeError, OSError))


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as one line on stderr."""
    print(f"warning: {message}", file=sys.stderr)


@app.command("plan")
def plan_command(
    model: options.ModelName,
    cluster: options.ClusterName,
    batch: options.Batch,
    seq: options.Sequence = None,
    docs: options.Documents = None,
    lora: options.Lora = None,
    work: options.Workload = None,
    system: options.System = None,
    only: options.Only = None,
    software: options.SoftwareName = None,
    any_system: Annotated[bool, typer.Option("--any", help="Also plans that no known system runs.")] = False,
    top: Annotated[int, typer.Option(min=1, help="Plans to show.")] = 10,
    price: options.Price = None,
    json: options.Json = False,
    output: options.Output = None,
    launcher: options.Launcher = None,
) -> None:
    """Ranks all plans of a model on a cluster, with reasons against those that cannot run.

    Exit code 1 if none fits.

    Example: parallel-ops plan --model llama3-8b --cluster h100x64 --batch 4M --output run.toml
    """
    shape = workload.model(model, seq, docs, lora, work)
    machine = inputs.cluster(cluster, price)
    system = _written_for(system, output, launcher)
    tried = replace(inputs.options(machine, system, only), any_system=any_system)
    result = _search(shape, machine, batch, tried, software, keep=max(top, 10))
    best, shown = result.best, result.plans[:top]
    if _write(best, system, output, launcher):
        return
    if json:
        json_data.show_result(json_data.search_data(result, shown))
        return
    console, ties = tables.console(), min(result.ties, len(shown))
    times = tables.whose_times(shown)
    has = find_target(system).limits.get("dtype", (FORMATS,))[0] if system else FORMATS
    fp8 = next((name for name in FORMATS if name.startswith("fp8") and name in has), "")
    if machine.gpu.fp8 and fp8 and not any(found.plan.dtype in FORMATS for found in shown):
        times += f"\n--only dtype=bf16:{fp8} ranks plans with the linears of layers in fp8, too."
    tables.show(
        console,
        tables.heading(best),
        tables.plans(shown, ties),
        f"{best.error_band.sentence()} {comparison.tied(result, ties)}".rstrip(),
        *workload.sentences(best),
        *tables.price(best),
        *comparison.beside(result),
        times,
        f"[dim]{tables.NOTATION}[/dim]",
        tables.gains(result),
        *([tables.misses(result)] if result.misses or comparison.close(result) else []),
    )
    console.print(tables.rejections(result))
    if lines := tables.sensitivity(result):
        console.print("\n[italic]Sensitivity to the assumed efficiencies[/italic]")
        console.print("\n".join(lines), highlight=False)


@app.command("estimate")
def estimate_command(
    model: options.ModelName,
    cluster: options.ClusterName,
    batch: options.Batch,
    seq: options.Sequence = None,
    docs: options.Documents = None,
    lora: options.Lora = None,
    work: options.Workload = None,
    plan: options.PlanText = None,
    system: options.WrittenFor = None,
    software: options.SoftwareName = None,
    price: options.Price = None,
    run: options.Run = None,
    prices: options.Prices = None,
    json: options.Json = False,
    output: options.Output = None,
    launcher: options.Launcher = None,
) -> None:
    """Time, memory and traffic of one plan.

    Exit code 1 if it does not fit in memory; --output writes it all the same.

    Example: parallel-ops estimate --model llama3-70b --cluster h100x512 --batch 4M --plan tp=8,pp=4,zero=1
    """
    system = _written_for(system, output, launcher)
    if prices is not None and run is None:
        raise ValueError("--prices is for the costs of --run")
    shape = workload.model(model, seq, docs, lora, work)
    machine = inputs.cluster(cluster, price)
    if plan is None:
        tried = inputs.options(machine, system if system in TARGETS else None, None)
        found = _search(shape, machine, batch, tried, software, keep=10).best
    else:
        target = find_target(system) if system else None
        given = inputs.plan(plan, machine.gpus, inputs.batch(batch, shape.seq_length), target)
        if system:
            export_plan(system, shape, machine, given)  # raises if the system cannot run it
        found = estimate_plan(shape, machine, given, software=software or (target.software if target else CURRENT))
    problem = memory_problem(found.cluster, found.plan, found.memory)
    if _write(found, system, output, launcher):
        if problem is not None:
            typer.echo(f"does not fit: {problem[1]}", err=True)
        sys.exit(0 if problem is None else NO)
    whole = expected(found, inputs.run(run, shape.seq_length), inputs.prices(prices)) if run is not None else None
    if json:
        json_data.show_result({**json_data.estimate_data(found), **({"run": whole} if whole else {})})
        sys.exit(0 if problem is None else NO)
    console = tables.console()
    broken = "\n".join(("[italic]Rules of thumb broken[/italic]", *(reason for _, reason in found.broken_rules)))
    tables.show(
        console,
        tables.heading(found),
        found.error_band.sentence(),
        *workload.sentences(found),
        tables.summary(found),
        *([tables.run(whole)] if whole else []),
        tables.memory(found),
        tables.transfers(found),
        *([broken] if found.broken_rules else []),
    )
    if problem is not None:
        console.print(f"[bold red]does not fit: {problem[1]}[/bold red]", highlight=False)
        sys.exit(NO)


@app.command("presets")
def presets_command(json: options.Json = False) -> None:
    """Lists the models, clusters and GPUs that have a name, and the eras of --software.

    Example: parallel-ops presets --json
    """
    found = {"models": presets.models(), "clusters": presets.clusters(), "gpus": presets.gpus(), "software": eras()}
    json_data.show(found) if json else tables.console().print(tables.names(found))


app.command("schedule")(schedule_command)


@app.command("validate")
def validate_command(
    rows: Annotated[bool, typer.Option("--rows", help="Print every row too.")] = False,
    runs: Annotated[
        Path | None, typer.Option(help="Compare with the runs of a CSV file instead.", show_default=False)
    ] = None,
    json: options.Json = False,
) -> None:
    """Compares the planner with published tables.

    Exit code 1 if a promise does not hold.

    Example: parallel-ops validate --rows
    """
    if runs is not None:
        found = list(read_runs(runs.name, runs.read_text(encoding="utf-8-sig", errors="replace")))
        if not found:
            raise ValueError(f"--runs: {runs} has no runs in it")
        if json:
            json_data.show(json_data.own_runs_data(found))
        else:
            tables.console().print(error_tables.own_runs(found))
        return
    with waiting(lambda: "comparing with published runs"):
        report = validate()
    if json:
        json_data.show_result(json_data.report_data(report))
    else:
        tables.show(
            tables.console(),
            *(error_tables.errors(report) if rows else ()),
            error_tables.summaries(report),
            error_tables.left_out(report),
            error_tables.constants(),
            error_tables.promises(report),
        )
    if not all(promise.met for promise in report.promises):
        sys.exit(NO)


def _written_for(system: str | None, output: Path | None, launcher: str | None) -> str | None:
    """The system that a plan is written for: that of --for, or `train` for a file in TOML."""
    if output is None and launcher is not None:
        raise ValueError("--launcher is for the file of --output")
    if output is not None and output.suffix == ".toml":
        system = system or TRAINER.name
    if output is not None and system is None:
        raise ValueError("--output writes the plan for a system; name it with --for")
    return system


def _write(found: Estimate, system: str | None, output: Path | None, launcher: str | None) -> bool:
    """Writes the plan to the file of --output; True if that is stdout, which then has nothing else."""
    if output is None or system is None:
        return False
    text = export_plan(system, found.model, found.cluster, found.plan)
    text = script(find_target(system), text, found.cluster, found.plan, launcher) if launcher else text
    if str(output) != "-":
        output.write_text(text, encoding="utf-8")
        return False
    print(text, end="")
    return True


def _search(
    model: Model, cluster: Cluster, batch: str, tried: SearchOptions, software: str | None, *, keep: int
) -> SearchResult:
    """The search; exits with code 1 if no plan fits."""
    sequences, name = inputs.batch(batch, model.seq_length), era(software).name if software else ""
    with waiting(lambda: "searching plans"):
        two = min(2, processors())
        found = search(model, cluster, batch=sequences, options=tried, software=name, keep=keep, processes=two)
    # Python walks over all objects before it ends: a second for those of a large search.
    atexit.register(gc.freeze)
    if not found.plans:
        fail(found.nothing_fits(), NO)
    return found
