"""The commands of ``parallel-ops``: the planner's, ``tokenize``, and those of the trainer, which alone load torch."""

import contextlib
import shlex
import sys
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from parallel_ops import __version__
from parallel_ops._internal.command_line import TRAIN, bytes_bar, fail, require, waiting
from parallel_ops._internal.files import one_path
from parallel_ops.planner.cli.app import app, main
from parallel_ops.tokenization.cli import tokenize_command

__all__ = ["main"]

_COMMAND = "parallel_ops.command"

app.command("tokenize", no_args_is_help=False)(tokenize_command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"parallel-ops {__version__}")
        raise typer.Exit()


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Plans and runs the parallel training of a language model.

    Every figure of a plan is an estimate; `validate` prints the errors. `parallel-ops COMMAND --help` has an example.
    """


class _Train(TyperCommand):
    """``--resume`` has a value or none, which typer's options cannot."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, others, left = [], [], [*args]
        while left:
            arg = left.pop(0)
            if arg != "--resume":
                given.append(arg)
                if not arg.startswith("--resume="):
                    others.append(arg)
                continue
            # A checkpoint is a folder: what is a file is the argument of the command.
            has_path = bool(left) and not left[0].startswith("-") and not Path(left[0]).is_file()
            given.append(f"--resume={left.pop(0) if has_path else ''}")
        ctx.meta[_COMMAND] = shlex.join([*ctx.command_path.split(), *others])
        return super().parse_args(ctx, given)


@app.command("train", cls=_Train)
def train_command(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="TOML file; see examples/train.toml.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="A key of the file: parallel.tp=2, or parallel=dp=2,tp=2.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps in all; fewer than run.steps are the first of its schedule.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="File for one JSON object a step: logging.jsonl.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[PATH]",
            help="Go on, on any ranks, from a checkpoint or the newest in a folder of them. Without PATH: from the "
            "newest in checkpoint.dir, if there is one.",
        ),
    ] = None,
    new_phase: Annotated[
        bool,
        typer.Option(
            "--new-phase",
            help="With --resume PATH: keep weights, and begin steps and learning rate anew, with other frozen "
            "parameters, adapters, sequence length or rotary positions.",
        ),
    ] = False,
    deepspeed: Annotated[
        Path | None, typer.Option(help="DeepSpeed JSON, which goes before the file.", show_default=False)
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes to start here.", show_default="as the plan has ranks")
    ] = None,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Choose the plan anew where there are other ranks than it has.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts of local processes from the last checkpoint after a failure.")
    ] = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a plan that does not fit in memory, rather than warn.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print mesh, memory and what the planner expects, and end.")
    ] = False,
    cluster: Annotated[
        str | None, typer.Option(help="Of --dry-run, as of `estimate`.", show_default="the GPUs here, or h100")
    ] = None,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Draw the pipeline as it ran, in logging.trace: by default trace beside the log."),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Trace some steps by torch's profiler, in logging.profile: by default profile beside the "
            "log; on a GPU with a snapshot of its memory.",
        ),
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of the file, and end.")] = False,
) -> None:
    """Trains a model as a TOML file says.

    In processes started here, or as a rank under torchrun. Ctrl-C ends the step under way and saves a checkpoint, as
    SIGTERM and SIGHUP do; a second one ends at once. Exit codes: 0 done, or stopped by SIGTERM or SIGHUP; 1 failed; 2
    wrong settings or files; 130 stopped by Ctrl-C.

    Example: parallel-ops train examples/train.toml --set parallel=dp=2,tp=2 --resume
    """
    require(*TRAIN)
    if schema:
        from parallel_ops.train.config import json_schema

        print(json_schema())
        return
    if file is None:
        raise ValueError("train needs a file: parallel-ops train run.toml; examples/train.toml is one")
    from parallel_ops.train.launch import cli as command
    from parallel_ops.train.launch import start as launch
    from parallel_ops.train.launch.options import Start
    from parallel_ops.train.launch.rendezvous import check_environment

    check_environment()
    wanted = [*(changes or [])]
    wanted += [] if json is None else [f"logging.jsonl={dumps(str(json), ensure_ascii=False)}"]
    with contextlib.nullcontext() if dry_run else launch.propagated():
        settings = command.settings_for(file, wanted, deepspeed, processes, steps=steps, trace=trace, profile=profile)
    if dry_run:
        command.dry_run(settings, cluster, strict=strict)
        return
    start = Start(
        resume=resume is not None, path=one_path(resume) if resume else None, new_phase=new_phase, elastic=elastic,
        max_restarts=max_restarts, command=context.meta[_COMMAND],
    )  # fmt: skip
    sys.exit(command.train(settings, start, strict=strict))


@app.command("calibrate")
def calibrate_command(
    file: Annotated[Path, typer.Argument(help="JSON file to write, for --cluster.")],
    processes: Annotated[
        int | None, typer.Option(min=1, help="Ranks that measure.", show_default="one on each GPU, or two on CPUs")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, max=86_400, help="How long to measure, about.")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print the cluster as JSON, as it is in the file.")] = False,
) -> None:
    """Measures matmuls, attention, a layer, updates and collectives here.

    Writes the cluster that `plan` takes by --cluster.

    Example: parallel-ops calibrate here.json --seconds 120
    """
    require(*TRAIN)
    from parallel_ops.train.calibration import command

    with waiting(lambda: f"measuring for about {seconds:g} s"):
        found = command.calibrate(file, processes, seconds)
    if as_json:
        print(file.read_text(encoding="utf-8"), end="")
        return
    command.report(file, *found)


@app.command("export")
def export_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of them: the newest.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32.", show_default="the precision of the run")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, or a model's folder, to copy the tokenizer of.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Writes a checkpoint of any plan as a Hugging Face folder.

    transformers opens it. Needs no GPU, and memory for one parameter.

    Example: parallel-ops export runs/example my-model --tokenizer tokenizer.json
    """
    require(*TRAIN)
    from parallel_ops.train import CheckpointError
    from parallel_ops.train.checkpoint.export import export

    with bytes_bar() as report:
        try:
            found = export(checkpoint, folder, dtype=dtype, tokenizer=tokenizer, report=report)
        except (CheckpointError, ImportError) as error:
            fail(error)
    if as_json:
        print(dumps(found))
        return
    print(
        f"{found['folder']}: {found['parameters']:,} parameters in {found['dtype']}, {found['bytes'] / 1e9:,.3f} GB, "
        f"as {found['model_type']}; step {found['step']:,} of {found['checkpoint']}"
    )


@app.command("inspect")
def inspect_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a folder of them, or a Hugging Face folder.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all files and compare their checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Says what a checkpoint is: step, sizes, model, plan, data, settings.

    Example: parallel-ops inspect runs/example --json
    """
    require(*TRAIN)
    from parallel_ops.train import CheckpointError
    from parallel_ops.train.checkpoint.inspection import described, inspect
    from parallel_ops.train.report.description import text

    try:
        with waiting(lambda: f"reading {checkpoint}"):
            found = inspect(checkpoint, verify=verify)
    except (CheckpointError, ImportError) as error:
        fail(error)
    print(dumps(found, default=str) if as_json else text(described(found)))


@app.command("doctor")
def doctor_command(
    processes: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start.", show_default="one on each GPU, or two on CPUs")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, max=86_400, help="How long a message may take.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Checks this machine and its ranks, and says what is wrong.

    Versions, GPUs, topology, limits and environment; an all-reduce, a message of each pair of ranks, and a run of two
    steps. Exit code 1 if a check failed.

    Example: parallel-ops doctor --processes 4
    """
    require(*TRAIN)
    from parallel_ops.doctor.command import check_all

    findings = []
    for finding in check_all(processes, seconds):
        findings.append(finding)
        if not as_json:
            cure = f"\n{'':10}{finding.cure}" if finding.cure else ""
            print(f"{finding.status:9} {finding.check}: {finding.found}{cure}", flush=True)
    if as_json:
        print(dumps([finding._asdict() for finding in findings]))
    sys.exit(1 if any(finding.status == "failed" for finding in findings) else 0)
