"""The command ``parallel-ops schedule``: a pipeline schedule, simulated and drawn."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from parallel_ops._internal.command_line import require
from parallel_ops.planner.cli import inputs, json_data, tables, workload
from parallel_ops.planner.cli.options import Json, Sequence, Workload, completed
from parallel_ops.planner.estimate import estimate as estimate_plan
from parallel_ops.planner.estimate import simulation as simulate_plan
from parallel_ops.planner.memory.timeline import memory_timeline
from parallel_ops.planner.pictures import drawing, figure
from parallel_ops.planner.schedules.schedule import KINDS, Times, actions, simulate

# Options of `schedule` that --plan takes the place of, as they are if not given.
_NO_PIPELINE = (None, None, "1f1b", None, "1,1,1", 0.0, False, None)
# Forward passes that are simulated one by one, in a minute (two cores of an EPYC, 2026-11).
_MOST_PASSES = 1 << 20
_LEAST_TIME, _MOST_TIME = 1e-100, 1e100


def schedule_command(
    pp: Annotated[int | None, typer.Option(help="Pipeline ranks.", show_default=False)] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches of a step.", show_default=False)] = None,
    kind: Annotated[str, typer.Option(help=", ".join(KINDS), autocompletion=completed(lambda: KINDS))] = "1f1b",
    virtual_stages: Annotated[int | None, typer.Option(help="Stages a rank.", show_default="the schedule's")] = None,
    times: Annotated[str, typer.Option(help="Times of F, I and W of one stage.")] = "1,1,1",
    link: Annotated[float, typer.Option(help="Time of a message between ranks.")] = 0.0,
    input_grad_first: Annotated[
        bool, typer.Option("--input-grad-first", help="A whole backward pass sends its gradient before W.")
    ] = False,
    memory_limit: Annotated[float | None, typer.Option(help="Micro-batches that a rank may hold, for zb-2p.")] = None,
    output: Annotated[Path | None, typer.Option(help="Save a picture, .svg or .png.")] = None,
    json: Json = False,
    model: Annotated[str | None, typer.Option(help="Draw the plan of a model, as `estimate` takes them.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Cluster of --model.")] = None,
    batch: Annotated[str | None, typer.Option(help="Batch of --model.")] = None,
    seq: Sequence = None,
    work: Workload = None,
    plan: Annotated[str | None, typer.Option(help="Plan of --model.")] = None,
    rank: Annotated[
        int | None, typer.Option(help="Rank of --plan whose memory is drawn.", show_default="the one with the most")
    ] = None,
) -> None:
    """Simulates a pipeline schedule and draws it; that of a plan with the memory of a rank over the step.

    Example: parallel-ops schedule --pp 4 --micro-batches 8 --kind zb-v --output schedule.svg
    """
    memory = None
    if model and cluster and batch and plan:
        pipeline = (pp, micro_batches, kind, virtual_stages, times, link, input_grad_first, memory_limit)
        if pipeline != _NO_PIPELINE:
            raise ValueError(
                "schedule: --plan has the sizes, schedule and times of its pipeline; leave those options out"
            )
        shape, machine = workload.model(model, seq, None, None, work), inputs.cluster(cluster, None)
        given = inputs.plan(plan, machine.gpus, inputs.batch(batch, shape.seq_length))
        _check_passes(given.pp, given.micro_batches, given.virtual_stages)
        found = estimate_plan(shape, machine, given)
        simulated, kind = simulate_plan(shape, machine, found.plan), found.plan.schedule
        most = found.peak_memory.stage
        memory = memory_timeline(shape, machine, found.plan, simulated, most if rank is None else rank)
    elif pp is None or micro_batches is None or model or cluster or batch or seq or work or plan or rank is not None:
        raise ValueError("schedule takes --pp and --micro-batches, or --model, --cluster, --batch and --plan")
    else:
        durations = replace(_times(times, link), input_grad_first=input_grad_first)
        stages = (2 if kind == "interleaved" else 1) if virtual_stages is None else virtual_stages
        _check_passes(pp, micro_batches, stages)
        options: dict[str, Any] = {} if memory_limit is None else {"memory_limit": memory_limit}
        if kind == "zb-2p":
            options["times"] = durations
        simulated = simulate(actions(kind, pp, micro_batches, stages, **options), durations)
    summary = drawing.summary(kind, simulated)
    if output is not None:
        require("matplotlib")
        figure.save(simulated, output, summary, memory)
    if json:
        more = {"memory": {**memory._asdict(), "peak": max(memory.totals)}} if memory else {}
        json_data.show_result({"kind": kind, **json_data.simulation_data(simulated), **more})
        return
    console = tables.console()
    console.print(drawing.text(simulated, console.width))
    console.print(summary, highlight=False)
    if memory:
        console.print(drawing.memory_text(simulated, memory, console.width))
        console.print(memory.caption, highlight=False)


def _check_passes(pp: int, micro_batches: int, stages: int) -> None:
    if (passes := pp * micro_batches * stages) > _MOST_PASSES:
        raise ValueError(
            f"schedule: pp * micro-batches * virtual stages must be at most {_MOST_PASSES:,}, got {passes:,}; the "
            f"bubble of fewer micro-batches tells as much"
        )


def _times(text: str, link: float) -> Times:
    try:
        forward, input_grad, weight_grad = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"--times must be three numbers, F,I,W, got {text!r}") from None
    if forward == input_grad == weight_grad == 0:
        raise ValueError(f"--times must have a number above 0, got {text!r}")
    times = Times(forward=forward, input_grad=input_grad, weight_grad=weight_grad, link=link)
    for option, time in (("--times", forward), ("--times", input_grad), ("--times", weight_grad), ("--link", link)):
        # Sums of a step, and columns of a picture over a time, are finite.
        if time and not _LEAST_TIME <= time <= _MOST_TIME:
            raise ValueError(f"{option} must be 0 or from {_LEAST_TIME} to {_MOST_TIME}, got {time}")
    return times
