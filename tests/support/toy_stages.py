"""A pipeline of numbers: stage s multiplies by its weight. Everything about its gradients is known."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel_ops.pipeline_parallel import Executor, Observer, Stages
from parallel_ops.pipeline_parallel.link import GroupLink
from parallel_ops.pipeline_parallel.messages import Messages
from parallel_ops.pipeline_parallel.trace import Recorder, Timed, gathered
from parallel_ops.planner.plan import V_SHAPED
from parallel_ops.planner.schedules.action import Action
from parallel_ops.planner.schedules.schedule import actions
from parallel_ops.tensor_parallel import DeferredWeightGradients
from support.layers import mesh_of

SHAPE = (3,)


class _Multiply(torch.autograd.Function):
    """``weight * x``, whose weight gradient goes to a queue; takes a time for each pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float, add: Callable[[float], None], queue: Any, seconds: float) -> Tensor:
        ctx.save_for_backward(x.detach())
        ctx.weight, ctx.add, ctx.queue, ctx.seconds = weight, add, queue, seconds
        time.sleep(seconds)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        kept, add, seconds = grad.clone(), ctx.add, ctx.seconds

        def weight_gradient() -> None:
            time.sleep(seconds)
            add(float((kept * x).sum()))

        ctx.queue.push(weight_gradient)
        time.sleep(seconds)
        return grad * ctx.weight, None, None, None, None


def weight(stage: int) -> float:
    return 1.0 + 0.1 * (stage % 5)


def schedule_of(kind: str, pp: int, micro_batches: int) -> tuple[list[list[Action]], Stages]:
    """A schedule, and stages of one layer each."""
    virtual = 2 if kind in (*V_SHAPED, "interleaved") else 1
    found = actions(kind, pp, micro_batches, virtual)
    stages = Stages((1,) * (pp * virtual), pp, kind in V_SHAPED)
    return [[a._replace(paired=False) for a in order] for order in found], stages


class Order(Observer):
    """What ran, in its order."""

    def __init__(self) -> None:
        self.ran: list[Action] = []

    def computed(self, action: Action) -> None:
        self.ran.append(action)


def run(
    rank: int, link: Any, schedule: list[list[Action]], stages: Stages, *, seconds: float = 0.0,
    observers: tuple[Observer, ...] = (), before: Callable[[int, int], None] = lambda stage, micro_batch: None,
) -> tuple[dict[int, Tensor], dict[int, float], Executor, Messages]:  # fmt: skip
    """(losses, weight gradients of this rank's stages, executor, messages) of a step."""
    queue, grads = DeferredWeightGradients(), dict.fromkeys(stages.on(rank), 0.0)
    messages = Messages(schedule, stages, rank, link)
    executor = Executor(schedule, stages, rank, messages, queue=queue, observers=observers)

    def forward(stage: int, micro_batch: int, x: Tensor | None) -> Tensor:
        before(stage, micro_batch)
        x = torch.full(SHAPE, 1.0 + micro_batch, requires_grad=True) if x is None else x

        def add(part: float) -> None:
            grads[stage] += part

        y = _Multiply.apply(x, weight(stage), add, queue, seconds)
        return y.sum() if stage == stages.count - 1 else y

    losses = executor.step(forward, lambda _: 1.0, shape=SHAPE, dtype=torch.float32, device=torch.device("cpu"))
    assert messages.pending() == 0
    return losses, grads, executor, messages


def expected(stages: int, micro_batches: int) -> tuple[dict[int, float], dict[int, float]]:
    """Losses by micro-batch and weight gradients by stage."""
    product = math.prod(weight(stage) for stage in range(stages))
    size = math.prod(SHAPE)
    losses = {m: size * (1.0 + m) * product for m in range(micro_batches)}
    return losses, {stage: sum(losses.values()) / weight(stage) for stage in range(stages)}


def paced(rank: int, kind: str, micro_batches: int, seconds: float) -> list[list[Timed]]:
    """The measured times of all ranks whose passes sleep."""
    mesh = mesh_of(pp=4)
    schedule, stages = schedule_of(kind, 4, micro_batches)
    recorder, group = Recorder(torch.device("cpu")), mesh.group("pp")
    assert group is not None
    recorder.restart(group)
    run(rank, GroupLink(group), schedule, stages, seconds=seconds, observers=(recorder,))
    return gathered(recorder.timed(), group)


def failing(rank: int, kind: str, where: tuple[int, int]) -> str:
    """The error of a rank when a stage raises in the forward of a micro-batch."""
    mesh = mesh_of(pp=4)
    schedule, stages = schedule_of(kind, 4, 8)

    def before(stage: int, micro_batch: int) -> None:
        if (stage, micro_batch) == where:
            raise FloatingPointError("a loss that is not finite")

    group = mesh.group("pp")
    assert group is not None
    run(rank, GroupLink(group), schedule, stages, before=before)
    return ""
