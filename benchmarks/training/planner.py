"""Steps of the trainer beside what the planner expects of them, after ``parallel-ops calibrate``.

    python -m benchmarks planner [--seconds 30] [--rounds 15] [--json FILE]

Ten plans of two and of four processes on this machine, data-, tensor- and pipeline-parallel with ZeRO 0 to 3, of a GPT
of 4 layers of width 256. The machine is measured with two and with four processes first. Each plan then has processes
of its own and takes ``--rounds`` steps. Both the fastest step and the median are shown: what others run on the machine
makes the median longer, and calibration on CPUs keeps the fastest repetitions, too. The error is of the fastest.
"""

import json as json_module
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.harness import options
from benchmarks.harness.processes import on_ranks
from benchmarks.harness.timing import HostTimer, Rounds, Stats, take_turns
from benchmarks.training.steps import settings_of, write_tokens
from parallel_ops._internal.command_line import processors
from parallel_ops.comm import ParallelMesh
from parallel_ops.planner.cli import inputs
from parallel_ops.train import Trainer
from parallel_ops.train.calibration.command import calibrate
from parallel_ops.train.config import Settings
from parallel_ops.train.launch.malloc import keep_freed_memory
from parallel_ops.train.planner_bridge import forecast

SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "seq_length": 256, "vocab_size": 1024}
PLANS: tuple[dict[str, Any], ...] = (
    {"dp": 2, "micro_batch": 2},
    {"dp": 2, "zero": 2},
    {"dp": 2, "zero": 3},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2, "input_grad_first": True},
    {"pp": 2, "schedule": "zb-h1", "input_grad_first": True},
    {"dp": 4, "zero": 1},
    {"dp": 2, "tp": 2, "zero": 2, "sequence_parallel": True},
    {"dp": 2, "pp": 2, "input_grad_first": True},
    {"tp": 2, "pp": 2, "sequence_parallel": True, "input_grad_first": True},
)
BATCH, WARM = 8, 2


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Of each of the two calibrations.")] = 30,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each plan.")] = 15,
    json: Annotated[Path | None, typer.Option(help="File for the rows.")] = None,
) -> None:
    """Expected and measured seconds of a step."""
    if json is not None:
        options.writable("--json", json.parent)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_tokens(folder)
        for ranks in (2, 4):
            file = folder / f"machine{ranks}.json"
            calibrate(file, ranks, seconds)
            machine = inputs.cluster(str(file))
            for plan in PLANS:
                settings = settings_of(data, SIZES, global_batch=BATCH, **plan)
                if settings.plan.gpus == ranks:
                    found = forecast(settings, machine)
                    steps: Stats = on_ranks(ranks, _measured, settings, rounds)
                    rows.append({"plan": settings.plan.describe(), "ranks": ranks, "expected": found.step,
                                 "fastest": steps.fastest, "median": steps.median})  # fmt: skip
    table = options.table("plan", "ranks", "expected ms", "fastest ms", "median ms", "error")
    errors = [row["expected"] / row["fastest"] - 1 for row in rows]
    for row, error in zip(rows, errors, strict=True):
        times = (f"{row[name] * 1e3:.0f}" for name in ("expected", "fastest", "median"))
        table.add_row(row["plan"], str(row["ranks"]), *times, f"{error:+.1%}")
    console = options.console()
    console.print(table)
    mean = statistics.mean(map(abs, errors))
    console.print(f"mean error {mean:.1%}, largest {max(map(abs, errors)):.1%}, bias {statistics.mean(errors):+.1%}")
    if json is not None:
        json.write_text(json_module.dumps(rows, indent=1) + "\n", encoding="utf-8")


app = options.single(main)


def _measured(rank: int, settings: Settings, rounds: int) -> Stats:
    """Seconds of a step of the trainer on one of the ranks."""
    plan = settings.plan
    torch.set_num_threads(max(1, processors() // plan.gpus))
    keep_freed_memory()
    trainer = Trainer(
        settings, ParallelMesh(pp=plan.pp, dp_shard=plan.dp_shard, dp_replicate=plan.dp_replicate, tp=plan.tp)
    )
    for _ in range(WARM):
        trainer.step()
    stats = take_turns(
        {"": trainer.step}, HostTimer(trainer.device, group=dist.group.WORLD, join=True), Rounds(rounds)
    )[""]
    trainer.loader.close()
    return stats
