"""The command line: ``python -m benchmarks [OP ...]`` and ``python -m benchmarks COMMAND``."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import ops as declared
from benchmarks.harness import report, results
from benchmarks.harness.environment import describe
from benchmarks.harness.measure import Settings, cases, measure
from benchmarks.harness.options import DTYPES, check, chosen_device, console, folder
from benchmarks.harness.spec import Benchmark
from parallel_ops._internal import command_line

# Commands that are more than one op on one device: module and summary. Each has options of its own.
COMMANDS = {
    "drop_in": ("training.drop_in", "models of Megatron-core, stock and with the ops"),
    "expert_exchange": ("parallel.expert_exchange", "how much experts in groups hide of the messages between them"),
    "host_time": ("host.host_time", "the host's time of calls on a GPU, without one"),
    "huggingface": ("training.huggingface", "models of Transformers, stock and with the ops"),
    "layouts": ("parallel.layouts", "area and keys sent of the layouts of context parallelism"),
    "moe": ("training.moe", "a layer of experts beside Transformers' and its products alone"),
    "muon": ("training.muon", "a step of Muon by owner beside its arithmetic and messages"),
    "overlap": ("parallel.overlap", "how much the overlapped linears hide"),
    "pipeline": ("parallel.pipeline", "idle time and throughput of pipeline schedules"),
    "planner": ("training.planner", "steps of the trainer beside the planner's"),
    "precision": ("training.precision", "losses in float8 beside those in bfloat16"),
    "ring_attention": ("parallel.ring_attention", "attention over a sequence that ranks share"),
    "step": ("training.step", "a step of the trainer beside plain DDP and FSDP2"),
}
_EPILOG = "Commands, each with a --help: " + "; ".join(f"{name}: {what}" for name, (_, what) in COMMANDS.items()) + "."

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def main() -> None:
    """Runs the command line."""
    if (name := next(iter(sys.argv[1:]), "")) in COMMANDS:
        del sys.argv[1]
        command_line.run(importlib.import_module(f"benchmarks.{COMMANDS[name][0]}").app, f"python -m benchmarks {name}")
    command_line.run(app, "python -m benchmarks")


@app.command(epilog=_EPILOG)
def command(
    ops: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]...", help="The ops to measure; all by default.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")] = "auto",
    dtype: Annotated[list[str] | None, typer.Option(help="float32, bfloat16 or float16; repeatable.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small tensors and few rounds: a look, not a result.")] = False,
    shapes: Annotated[
        int | None, typer.Option(min=1, help="Measure the first so many shapes of each op alone.")
    ] = None,
    composites: Annotated[
        bool,
        typer.Option(
            "--composites/--no-composites",
            help="Beside the PyTorch composite, eager and compiled, and peers that compile.",
        ),
    ] = True,
    replay: Annotated[bool, typer.Option("--replay", help="Also replays of a CUDA graph of the op.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder for the CSV file.")] = None,
    list_ops: Annotated[bool, typer.Option("--list", help="Name the ops and stop.")] = False,
) -> None:
    """Time, bandwidth and memory of the fused ops against eager PyTorch, torch.compile and torch.clone.

    Results go to benchmarks/results/DEVICE.csv, those of --quick to benchmarks/results/quick; rows of an earlier run
    are replaced, case by case. Exit code 1 if a case could not be measured.

    Example: python -m benchmarks rms_norm --quick
    """
    known = declared.every()
    if list_ops:
        typer.echo("\n".join(known))
        return
    check("op", ops, known)
    check("dtype", dtype, DTYPES)
    where = torch.device(chosen_device(device))
    if replay and where.type != "cuda":
        command_line.fail("--replay needs a CUDA device")
    dtypes = tuple(DTYPES[name] for name in dict.fromkeys(dtype or ["float32", "bfloat16"]))
    settings = Settings.standard(where, dtypes, quick, shapes, composites, replay)
    benchmarks = [known[op] for op in dict.fromkeys(ops or known)]
    if not run(benchmarks, settings, folder(output, quick), console()):
        raise typer.Exit(1)


def run(benchmarks: Sequence[Benchmark], settings: Settings, folder: Path, console: Console) -> bool:
    """Measures, writes the CSV file after each case, prints the tables.

    Returns:
        False if something could not be measured.
    """
    environment = describe(settings.device)
    table = folder / f"{environment.device}.csv"
    problems: list[str] = []
    measured: list[results.Row] = []
    for benchmark in benchmarks:
        rows: list[results.Row] = []
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(f"{benchmark.op}: compiling", total=None)
            for case in cases(benchmark, settings, problems):
                progress.update(task, description=f"{case.op}: {case.direction} {case.dtype} {list(case.shape)}")
                try:
                    rows += (found := measure(case, settings, environment))
                    results.merge(table, found)
                except Exception as error:  # one case that runs out of memory must not cost the others
                    problems.append(f"{case.op}: {case.direction} {case.dtype} {list(case.shape)}: {error}")
        if not rows:
            continue
        report.print_op(console, rows, benchmark.flops)
        measured += rows
    report.print_summary(console, measured)
    console.print(f"written to {table}", soft_wrap=True, highlight=False)
    for problem in problems:
        print(f"benchmarks: {problem}", file=sys.stderr)
    return not problems
