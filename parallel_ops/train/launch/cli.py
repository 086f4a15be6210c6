"""The command ``parallel-ops train``."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Column, Table

from parallel_ops._internal.command_line import INTERRUPTED, fail, unbroken_output, waiting
from parallel_ops._internal.files import read_toml
from parallel_ops.planner.results import DEVICE_MEMORY
from parallel_ops.train.checkpoint.checkpoints import CheckpointError
from parallel_ops.train.config import Settings
from parallel_ops.train.config_file import settings_of, with_changes, with_steps
from parallel_ops.train.launch import start as launch
from parallel_ops.train.launch.consistency import Disagreement
from parallel_ops.train.launch.local import FAILED, PLAIN, Failure
from parallel_ops.train.launch.options import Start
from parallel_ops.train.launch.rendezvous import first_rank, under_torchrun
from parallel_ops.train.planner_bridge import (
    Device,
    cluster_of,
    document_cost,
    forecast,
    memory_problem,
    rank_memory,
    replan,
)
from parallel_ops.train.report import description
from parallel_ops.train.settings.deepspeed import with_deepspeed

# Below this a model is too small for its utilisation to say anything.
_SOME_MFU = 0.001


def settings_for(
    file: Path,
    changes: list[str],
    deepspeed: Path | None,
    processes: int | None,
    *,
    steps: int | None = None,
    trace: bool = False,
    profile: bool = False,
) -> Settings:
    """The settings of a file, changed by a DeepSpeed JSON and the command line, for ``processes`` processes.

    Args:
        steps: Steps in all. Fewer than the file's are the first of its schedule.
        trace: Draw the pipeline in ``logging.trace``; if that is not set, in a folder beside ``logging.jsonl``.
        profile: The same of ``logging.profile``.

    Raises:
        ValueError, OSError: A setting or file is invalid; the message names it.
    """
    data = with_changes(read_toml(file), changes)
    if deepspeed is not None:
        ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else processes
        data = with_deepspeed(data, deepspeed, ranks)
    if steps is not None:
        data = with_steps(data, steps)
    for name in [*(["trace"] if trace else []), *(["profile"] if profile else [])]:
        logging = dict(data.get("logging", {}))
        logging.setdefault(name, str(Path(logging.get("jsonl", ".")).parent / name))
        data = {**data, "logging": logging}
    settings = settings_of(data, str(file))
    if processes is None or processes == settings.plan.gpus:
        return settings
    if under_torchrun():
        raise ValueError("--processes: torchrun has started them; leave it out")
    found = replan(settings, processes, Device.here(settings, processes))
    _say(launch.described_change(settings, found))
    return found


@unbroken_output()
def train(settings: Settings, start: Start, *, strict: bool) -> int:
    """Trains and returns the exit code, even if nothing reads its output. The error of a failed run is printed.

    Raises:
        ValueError, OSError: Settings or files are invalid, before anything is started, or differ between ranks.
    """
    if under_torchrun():
        start = replace(start, command=start.command.replace("parallel-ops", "torchrun ... -m parallel_ops", 1))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", settings.plan.gpus))
    try:
        with launch.propagated():
            _check_memory(settings, Device.here(settings, ranks), strict)
            with waiting(lambda: "checking files and tokens"):
                share = launch.check(settings, start)
            if under_torchrun():
                given, settings = settings, launch.fitted(settings, int(os.environ["WORLD_SIZE"]), start)
                if settings is not given and first_rank():
                    _say(launch.described_change(given, settings))
    except (CheckpointError, ImportError) as error:
        fail(error)
    if share < 1:
        _say(
            f"note: {share:.1%} of the data were compared with the vocabulary before the start, the rest are when read"
        )
    try:
        stopped = launch.run(settings, start)
    except Disagreement:
        raise
    except Failure as failure:
        _clear_line()
        print(failure.trace, end="", file=sys.stderr)
        fail(failure, FAILED)
    except PLAIN as error:
        _clear_line()
        fail(error, FAILED)
    result = stopped.result
    if stopped.signal and first_rank():
        saved = f"; {result.checkpoint} has it, resume with --resume" if result and result.checkpoint else ""
        _clear_line()
        _say(
            f"stopped by {stopped.signal}"
            + (f" after step {result.step}{saved}" if result else " at once, without a checkpoint")
        )
    return INTERRUPTED if stopped.signal == "SIGINT" else 0


def dry_run(settings: Settings, cluster: str | None, *, strict: bool) -> None:
    """Prints plan, memory, expected step time and data of a run.

    Raises:
        ValueError, OSError: The cluster is unknown, the plan cannot run on it, or with ``strict`` is beyond the memory;
            last, once the rest is printed: data is missing, cannot be read, or has tokens outside the vocabulary.
    """
    plan = settings.plan
    machine = cluster_of(cluster, plan)
    expected = forecast(settings, machine)
    console = Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=120)
    # Without a GPU the run would be on CPUs, unless another cluster is named.
    device = Device.here(settings, plan.gpus)
    gpu = cluster is not None or device.gpu
    where = machine.gpu.name if cluster is not None else device.name if gpu else "CPU"
    parameters = description.parameters_of(settings.config, settings.lora)
    lines = description.plan_lines(settings, where, parameters)
    console.print(f"{description.text(lines, console.width)}\n", highlight=False, markup=False)
    found = rank_memory(settings, gpu=gpu)
    sizes = [Column(header, justify="right") for header in ("bytes", "")]
    table = Table("each rank holds", *sizes, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in DEVICE_MEMORY:
        if size := getattr(found, name):
            table.add_row(name if gpu or name != "runtime" else "allocator", f"{size:,.0f}", _size(size))
    table.add_row("all", f"{found.total:,.0f}", _size(found.total))
    if found.host:
        table.add_row("in host memory", f"{found.host:,.0f}", _size(found.host))
    console.print(table)
    assumed = "" if gpu else " (no GPU is here; --cluster names others)"
    mfu = f", MFU {expected.mfu:.1%}" if expected.mfu >= _SOME_MFU else ""
    console.print(
        f"\non {machine.name}{assumed} the planner expects a step of {expected.step:.4g} s, "
        f"{expected.tokens_per_second:,.0f} tokens/s{mfu}; {expected.error_band.sentence()}",
        highlight=False,
    )
    _check_memory(settings, device, strict)
    try:
        built = launch.samples_of(settings)
        share = launch.compared(settings, built)
    except ImportError as error:
        fail(error)
    compared = (
        "its tokens are in the vocabulary" if share == 1 else f"{share:.1%} of it was compared with the vocabulary"
    )
    lines = [*description.data_lines(built[0], settings.run.steps * plan.global_batch), ("", compared)]
    console.print(f"\n{description.text(lines, console.width)}", highlight=False, markup=False)
    if settings.data.document_mask:
        console.print(f"\n{document_cost(settings, built[0].stream.lengths)}", highlight=False)
    for warning in description.warnings(built[0], built[1] if len(built) > 1 else None):
        _say(warning)


def _size(count: float) -> str:
    """Bytes in MiB or GiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _check_memory(settings: Settings, device: Device, strict: bool) -> None:
    if (reason := memory_problem(settings, device)) is None:
        return
    if strict:
        raise ValueError(f"{reason} (--strict)")
    if first_rank():
        _say(f"warning: {reason}")


def _clear_line() -> None:
    """Clears a progress bar that a killed process may have left on the terminal."""
    if sys.stdout.isatty():
        print("\r\x1b[K", end="", flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
