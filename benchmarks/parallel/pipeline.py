"""The pipeline's executor: bubbles beside the planner's, host time of an action, tokens a second of a model.

    python -m benchmarks pipeline [--seconds 0.2] [--micro-batches 8]     stages that sleep for F, I and W
    python -m benchmarks pipeline --host                                  an action without a message or a matmul
    python -m benchmarks pipeline --model [--rounds 7]                    two stages beside one process

Stages that sleep need no cores, so their bubble is that of the schedule and of the executor, whatever the machine. The
model has 4 layers with hidden size 512, 8 heads, 8 sequences of 512 tokens and a vocabulary of 8,192, in fp32; the two
arms take turns, a step each.
"""

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from benchmarks.harness import options
from benchmarks.harness.processes import on_ranks
from benchmarks.harness.timing import HostTimer, Rounds, take_turns
from parallel_ops import ParallelMesh
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.pipeline_parallel import Executor, Pipeline, Stages
from parallel_ops.pipeline_parallel.link import GroupLink
from parallel_ops.pipeline_parallel.messages import Messages
from parallel_ops.pipeline_parallel.trace import Recorder, gathered, simulation_of
from parallel_ops.planner.plan import SCHEDULES, V_SHAPED, Plan
from parallel_ops.planner.schedules.action import Action, without_pairs
from parallel_ops.planner.schedules.schedule import actions, simulate
from parallel_ops.planner.schedules.times import Times
from parallel_ops.tensor_parallel import DeferredWeightGradients
from parallel_ops.train import parallelize

MODEL = TransformerConfig(
    vocab_size=8192, seq_length=512, num_layers=4, hidden_size=512, num_heads=8, positions="rotary", norm="rms_norm",
    activation="swiglu", bias=False, tied_embeddings=False,
)  # fmt: skip
SEQUENCES = 8


def main(
    seconds: Annotated[float, typer.Option(min=0, help="Of each F, I and W; half of it with two stages a rank.")] = 0.2,
    micro_batches: Annotated[int, typer.Option(min=1, help="Of a step.")] = 8,
    ranks: Annotated[int, typer.Option(min=1, help="Pipeline ranks.")] = 4,
    host: Annotated[bool, typer.Option("--host", help="Host time of an action.")] = False,
    model: Annotated[bool, typer.Option("--model", help="Two stages of a model beside one process.")] = False,
    rounds: Annotated[
        int, typer.Option(min=1, help="Steps of which the median is shown, after one that is not timed.")
    ] = 7,
) -> None:
    """Prints a table."""
    if host:
        table = options.table("actions", "us an action")
        for kind, micros in host_times().items():
            table.add_row(kind, f"{micros:.0f}")
    elif model:
        table = options.table("on two cores", "tokens/s")
        for name, rate in on_ranks(2, throughput, rounds).items():
            table.add_row(name, f"{rate:,.0f}")
    else:
        table = options.table("schedule", "bubble", "simulated", "of 1F1B, sent after W")
        found = on_ranks(ranks, paced, seconds, micro_batches)
        plain = simulate(schedule_of("1f1b", ranks, micro_batches)[0]).bubble
        for kind, (ran, planned) in found.items():
            table.add_row(kind, f"{ran:.4f}", f"{planned:.4f}", f"{ran / plain:.0%}")
    options.console().print(table)


app = options.single(main)


def schedule_of(kind: str, pp: int, micro_batches: int) -> tuple[list[list[Action]], Stages]:
    """A schedule, and stages of one layer each."""
    virtual = 2 if kind in (*V_SHAPED, "interleaved") else 1
    stages = Stages((1,) * (pp * virtual), pp, kind in V_SHAPED)
    return without_pairs(actions(kind, pp, micro_batches, virtual)), stages


class Sleep(torch.autograd.Function):
    """A stage that sleeps in its forward, its input gradient and, in a queue, its weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, queue: DeferredWeightGradients) -> Tensor:
        ctx.seconds, ctx.queue = seconds, queue
        _sleep(seconds)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        seconds = ctx.seconds
        ctx.queue.push(lambda: _sleep(seconds))
        _sleep(seconds)
        return grad * 1.0, None, None


def _sleep(seconds: float) -> None:
    if seconds:  # else the operating system takes 50 us
        time.sleep(seconds)


def one_step(
    rank: int, kind: str, pp: int, micro_batches: int, seconds: float, link: Any, recorder: Recorder
) -> list[list[Action]]:
    """A step of stages that sleep; returns the schedule."""
    schedule, stages = schedule_of(kind, pp, micro_batches)
    queue = DeferredWeightGradients()
    messages = Messages(schedule, stages, rank, link)
    executor = Executor(schedule, stages, rank, messages, queue=queue, observers=[recorder])
    each = seconds * pp / stages.count

    def forward(stage: int, micro_batch: int, x: Tensor | None) -> Tensor:
        y = Sleep.apply(torch.zeros(4, requires_grad=True) if x is None else x, each, queue)
        return y.sum() if stage == stages.count - 1 else y

    executor.step(forward, lambda _: 1.0, shape=(4,), dtype=torch.float32, device=torch.device("cpu"))
    return schedule


def paced(rank: int, seconds: float, micro_batches: int) -> dict[str, tuple[float, float]]:
    """The measured bubble of each schedule and the simulated one."""
    group = dist.group.WORLD
    assert group is not None
    recorder, found = Recorder(torch.device("cpu")), {}
    for kind in SCHEDULES:
        # The first messages of two ranks connect them.
        one_step(rank, kind, group.size(), 2 * group.size(), 0.0, GroupLink(group), recorder)
        recorder.restart(group)
        schedule = one_step(rank, kind, group.size(), micro_batches, seconds, GroupLink(group), recorder)
        ran = simulation_of(gathered(recorder.timed(), group))
        found[kind] = ran.bubble, simulate(schedule, Times(input_grad_first=True)).bubble
    return found


def host_times(actions_timed: int = 3000) -> dict[str, float]:
    """Microseconds of the host for an action of one rank, whose stage does nothing."""
    found = {}
    for kind, name in (("1f1b", "F and B"), ("zb-h1", "F, I and W")):
        recorder, runs = Recorder(torch.device("cpu")), []
        for _ in range(5):
            recorder.restart(None)
            start = time.perf_counter()
            schedule = one_step(0, kind, 1, actions_timed // 3, 0.0, None, recorder)
            runs.append((time.perf_counter() - start) / len(schedule[0]) * 1e6)
        found[name] = statistics.median(runs)
    return found


def throughput(rank: int, rounds: int) -> dict[str, float]:
    """Tokens a second of one process with two threads, and of the two stages of each schedule with one."""
    mesh = ParallelMesh(pp=2)
    text = torch.randint(
        MODEL.vocab_size, (MODEL.seq_length + 1, SEQUENCES), generator=torch.Generator().manual_seed(0)
    )
    inputs = [{"tokens": text[:-1, n : n + 1], "targets": text[1:, n : n + 1]} for n in range(SEQUENCES)]
    steps: dict[str, Callable[[], object]] = {}
    if rank == 0:
        whole = Transformer(MODEL)

        def alone() -> None:
            torch.set_num_threads(2)
            for given in inputs:
                whole(**given).backward()
            whole.zero_grad()
            torch.set_num_threads(1)

        steps["one process"] = alone
    else:
        steps["one process"] = lambda: None
    for kind in ("1f1b", "zb-h1", "zb-v"):
        plan = Plan(
            pp=2, schedule=kind, virtual_stages=2 if kind == "zb-v" else 1, global_batch=SEQUENCES, dtype="fp32"
        )
        model: Any = parallelize(Transformer(MODEL, device="meta"), mesh, plan)
        model.to_empty(device="cpu")
        model.reset_parameters()
        pipeline = Pipeline(model, mesh, plan)

        def staged(pipeline: Pipeline = pipeline, model: Any = model) -> None:
            pipeline.step(inputs, lambda _: 1.0)
            model.zero_grad()

        steps[f"pp 2, {kind}"] = staged
    stats = take_turns(steps, HostTimer(torch.device("cpu"), group=dist.group.WORLD, join=True), Rounds(rounds))
    return {name: SEQUENCES * MODEL.seq_length / own.median for name, own in stats.items()}
