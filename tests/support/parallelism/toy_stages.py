"""A pipeline of numbers: stage s multiplies by its weight. Everything about its gradients is known."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.parallel import pipeline
from benchmarks.parallel.pipeline import schedule_of
from parallel_ops.pipeline_parallel import Executor, Observer, Stages
from parallel_ops.pipeline_parallel.messages import Messages
from parallel_ops.planner.schedules.action import Action
from parallel_ops.tensor_parallel import DeferredWeightGradients

__all__ = ["schedule_of"]

SHAPE = (3,)


class _Multiply(torch.autograd.Function):
    """``weight * x``, whose weight gradient goes to a queue."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float, add: Callable[[float], None], queue: Any) -> Tensor:
        ctx.save_for_backward(x.detach())
        ctx.weight, ctx.add, ctx.queue = weight, add, queue
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        kept, add = grad.clone(), ctx.add
        ctx.queue.push(lambda: add(float((kept * x).sum())))
        return grad * ctx.weight, None, None, None


def weight(stage: int) -> float:
    return 1.0 + 0.1 * (stage % 5)


class Order(Observer):
    """What ran, in its order."""

    def __init__(self) -> None:
        self.ran: list[Action] = []

    def computed(self, action: Action) -> None:
        self.ran.append(action)


def run(
    rank: int, link: Any, schedule: list[list[Action]], stages: Stages, *,
    observers: tuple[Observer, ...] = (),
) -> tuple[dict[int, Tensor], dict[int, float], Executor, Messages]:  # fmt: skip
    """(losses, weight gradients of this rank's stages, executor, messages) of a step."""
    queue, grads = DeferredWeightGradients(), dict.fromkeys(stages.on(rank), 0.0)
    messages = Messages(schedule, stages, rank, link)
    executor = Executor(schedule, stages, rank, messages, queue=queue, observers=observers)

    def forward(stage: int, micro_batch: int, x: Tensor | None) -> Tensor:
        x = torch.full(SHAPE, 1.0 + micro_batch, requires_grad=True) if x is None else x

        def add(part: float) -> None:
            grads[stage] += part

        y = _Multiply.apply(x, weight(stage), add, queue)
        return y.sum() if stage == stages.count - 1 else y

    losses = executor.step(forward, lambda _: 1.0, shape=SHAPE, dtype=torch.float32, device=torch.device("cpu"))
    assert not messages._posted and not messages._here
    return losses, grads, executor, messages


def expected(stages: int, micro_batches: int) -> tuple[dict[int, float], dict[int, float]]:
    """Losses by micro-batch and weight gradients by stage."""
    product = math.prod(weight(stage) for stage in range(stages))
    size = math.prod(SHAPE)
    losses = {m: size * (1.0 + m) * product for m in range(micro_batches)}
    return losses, {stage: sum(losses.values()) / weight(stage) for stage in range(stages)}


def paced(rank: int, seconds: float, micro_batches: int) -> dict[str, tuple[float, float]]:
    """See the benchmark."""
    return pipeline.paced(rank, seconds, micro_batches)
