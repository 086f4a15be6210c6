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

from benchmarks import report, results
from benchmarks.environment import describe
from benchmarks.harness import Settings, cases, measure
from benchmarks.plot import plot_op
from benchmarks.spec import Benchmark
from parallel_ops._internal import command_line

_FOLDER = Path(__file__).parent
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEVICES = ("auto", "cpu", "cuda")
# What is not one op on one device. ``bench_<name>.py`` has the options of each.
_COMMANDS = {
    "drop_in": "models of Megatron-core, stock and with the ops",
    "expert_exchange": "what experts in groups hide of the messages between them",
    "host_time": "what calls cost the host on a GPU, without one",
    "huggingface": "models of Transformers, stock and with the ops",
    "moe": "a layer of experts beside Transformers' and its products alone",
    "overlap": "what the overlapped linears hide",
    "pipeline": "idle time and throughput of pipeline schedules",
    "planner": "steps of the trainer beside what the planner expects of them",
    "ring_attention": "attention over a sequence that ranks share",
    "step": "a step of the trainer beside plain DDP and FSDP2",
}
_EPILOG = "Commands, each with a --help: " + "; ".join(f"{name}: {what}" for name, what in _COMMANDS.items()) + "."

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def main() -> None:
    """Runs the command line."""
    if (name := next(iter(sys.argv[1:]), "")) in _COMMANDS:
        del sys.argv[1]
        command_line.run(importlib.import_module(f"benchmarks.bench_{name}").app, f"python -m benchmarks {name}")
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
        bool, typer.Option("--composites/--no-composites", help="Beside the PyTorch composite, eager and compiled.")
    ] = True,
    replay: Annotated[bool, typer.Option("--replay", help="Also replays of a CUDA graph of the op.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder for the CSV file and the charts.")] = None,
    list_ops: Annotated[bool, typer.Option("--list", help="Name the ops and stop.")] = False,
) -> None:
    """Time, bandwidth and memory of the fused ops against eager PyTorch, torch.compile and torch.clone.

    Results go to benchmarks/results/DEVICE.csv, those of --quick to benchmarks/results/quick; rows of an earlier run
    are replaced, case by case. Exit code 1 if a case could not be measured.

    Example: python -m benchmarks rms_norm --quick
    """
    known = ops_available()
    if list_ops:
        typer.echo("\n".join(known))
        return
    for op in ops or []:
        if op not in known:
            command_line.fail(f"unknown op {op!r}; choose from {', '.join(known)}")
    for name in dtype or []:
        if name not in _DTYPES:
            command_line.fail(f"unknown dtype {name!r}; choose from {', '.join(_DTYPES)}")
    if device not in _DEVICES:
        command_line.fail(f"unknown device {device!r}; choose from {', '.join(_DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        command_line.fail("no CUDA device is there; use --device cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = tuple(_DTYPES[name] for name in dict.fromkeys(dtype or ["float32", "bfloat16"]))
    if replay and device != "cuda":
        command_line.fail("--replay needs a CUDA device")
    settings = Settings.standard(torch.device(device), dtypes, quick, shapes, composites, replay)
    folder = output or _FOLDER / "results" / ("quick" if quick else "")
    console = Console() if sys.stdout.isatty() else Console(width=120)  # in a log file, lines may be long
    benchmarks = [load(op) for op in dict.fromkeys(ops or known)]
    if not run(benchmarks, settings, folder, console):
        raise typer.Exit(1)


def ops_available() -> list[str]:
    """The ops that have a benchmark file."""
    return sorted({path.stem.removeprefix("bench_") for path in _FOLDER.glob("bench_*.py")} - set(_COMMANDS))


def load(op: str) -> Benchmark:
    benchmark: Benchmark = importlib.import_module(f"benchmarks.bench_{op}").BENCHMARK
    return benchmark


def run(benchmarks: Sequence[Benchmark], settings: Settings, folder: Path, console: Console) -> bool:
    """Measures, writes the CSV file and the charts, prints the tables; False when something could not be measured."""
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
                    rows += measure(case, settings, environment)
                except Exception as error:  # one case that runs out of memory must not cost the others
                    problems.append(f"{case.op}: {case.direction} {case.dtype} {list(case.shape)}: {error}")
        if not rows:
            continue
        stored = results.merge(table, rows)
        plot_op([row for row in stored if row.op == benchmark.op], folder / f"{environment.device}-{benchmark.op}.png")
        report.print_op(console, rows, benchmark.flops)
        measured += rows
    report.print_summary(console, measured)
    console.print(f"written to {table}", soft_wrap=True, highlight=False)
    for problem in problems:
        print(f"benchmarks: {problem}", file=sys.stderr)
    return not problems
