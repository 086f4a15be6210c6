"""Runs one rank's list of actions: F, I, W and B of its stages, and the messages between ranks.

B computes the gradient of the stage's input, sends it, and computes the weight gradients then: the stage before need
not wait for them. I does the first, W the second part. A pair of F and B computes both together
(``_internal.distributed.turns``), after the messages of both are there and before either's is sent. Weight gradients
are those that the stage's linears leave to a queue (``DeferredWeightGradients``); all others, of norms, biases and
embeddings, are computed with the input's.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallel_ops._internal.distributed.turns import together
from parallel_ops.pipeline_parallel.cut import Stages
from parallel_ops.pipeline_parallel.messages import Messages
from parallel_ops.pipeline_parallel.receives import Key, Place, sent_by
from parallel_ops.planner.schedules.action import Action

# Stage, micro-batch, and the activations of the stage before (None for stage 0) to the activations of the stage; for
# the last one to the loss.
Forward = Callable[[int, int, Tensor | None], Tensor]


class Queue(Protocol):
    """Where a backward leaves weight gradients, as ``DeferredWeightGradients``."""

    keep_gathered: bool

    def dw_builder(self) -> Callable[[], None]: ...


class Observer:
    """Called as a step goes on; the methods do nothing."""

    def begin(self, action: Action) -> None:
        """An action starts, whose message may not be there yet."""

    def compute(self, action: Action) -> None:
        """The message is there: the action computes."""

    def input_gradient(self, action: Action) -> None:
        """I, or the first part of B, has ended: the gradient of the stage's input is on its way."""

    def computed(self, action: Action) -> None:
        """The action has ended."""

    def reducible(self, stage: int, *, last: bool) -> None:
        """The weight gradients of a micro-batch are complete; ``last``: those of all micro-batches of the stage."""


class Executor:
    """One rank of a pipeline.

    Args:
        schedule: The actions of all ranks, from ``parallel_ops.planner.schedules.schedule.actions``.
        stages: The layers and ranks of the stages. rank: This pipeline rank.
        messages: Those of this rank.
        queue: Collects the weight gradients of a backward; ``None`` for a model without, whose B computes everything
            before it sends.
        observers: Called in order.

    Attributes:
        peak_live: The largest number of pairs of stage and micro-batch whose activations were held, from F until W or
            B, in the last step. peak_deferred: The same from I until W.

    Raises:
        ValueError: The schedule has W, but there is no queue.
    """

    def __init__(
        self, schedule: Sequence[Sequence[Action]], stages: Stages, rank: int, messages: Messages, *,
        queue: Queue | None = None, observers: Sequence[Observer] = (),
    ) -> None:  # fmt: skip
        self.order, self.stages, self.messages, self.queue = list(schedule[rank]), stages, messages, queue
        self.observers = list(observers)
        self.peak_live = self.peak_deferred = 0
        if queue is None and any(action.kind == "W" for action in self.order):
            raise ValueError("pipeline: a schedule with W needs a queue of weight gradients")
        # The last action of each stage that computes weight gradients.
        self._last = {action.stage: n for n, action in enumerate(self.order) if action.kind in "WB"}
        # Of a stage that is not the last, only where the gradient enters: its output is needed no more once it is sent.
        # None for a first stage that is frozen as a whole.
        self._live: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge | None]] = {}
        self._later: dict[tuple[int, int], Callable[[], None]] = {}

    def step(
        self, forward: Forward, scale: Callable[[int], Tensor | float], *, shape: Sequence[int], dtype: torch.dtype,
        device: torch.device,
    ) -> dict[int, Tensor]:  # fmt: skip
        """Runs the list. All ranks call it.

        Args:
            scale: Returns the factor of a micro-batch's loss, of which the gradients are taken.
            shape, dtype, device: Of the activations between stages.

        Returns:
            The loss of each micro-batch on the rank of the last stage, detached; empty elsewhere.
        """
        losses: dict[int, Tensor] = {}
        self.peak_live = self.peak_deferred = 0
        self._live, self._later = {}, {}
        self.messages.begin(shape, dtype, device)
        paired: Action | None = None
        for number, action in enumerate(self.order):
            self.messages.reach(Place(action))
            for observer in self.observers:
                observer.begin(action)
            if action.paired:
                paired = action  # runs with the next one
                continue
            if paired is not None:
                self._pair(paired, action, forward, scale, losses)
            elif action.kind == "F":
                self._forward(action, forward, losses)
            elif action.kind == "W":
                self._compute(action)
                self._later.pop((action.stage, action.micro_batch))()
            else:
                self._backward(action, scale)
            for ended in [action] if paired is None else [paired, action]:
                for observer in self.observers:
                    observer.computed(ended)
            paired = None
            if action.kind in "WB":
                for observer in self.observers:
                    observer.reducible(action.stage, last=self._last[action.stage] == number)
        self.messages.end()
        return losses

    def evaluate(
        self, order: Sequence[Action], messages: Messages, forward: Forward, *, shape: Sequence[int],
        dtype: torch.dtype, device: torch.device,
    ) -> dict[int, Tensor]:  # fmt: skip
        """Runs another list, of F alone, without gradients. All ranks call it.

        Args:
            messages: Those of this rank in that list. shape, dtype, device: See ``step``.

        Returns:
            As ``step`` does.
        """
        losses: dict[int, Tensor] = {}
        messages.begin(shape, dtype, device)
        for action in order:
            messages.reach(Place(action))
            for observer in self.observers:
                observer.begin(action)
            stage, micro_batch = action.stage, action.micro_batch
            x = messages.receive(action)
            self._compute(action)
            y = forward(stage, micro_batch, x)
            if (key := sent_by(action, self.stages.count)) is None:
                losses[micro_batch] = y
            else:
                messages.send(key, y)
            for observer in self.observers:
                observer.computed(action)
        messages.end()
        return losses

    def _compute(self, action: Action) -> None:
        for observer in self.observers:
            observer.compute(action)

    def _forward(self, action: Action, forward: Forward, losses: dict[int, Tensor]) -> None:
        x = self._input(action)
        self._compute(action)
        self._leave(action, x, forward(action.stage, action.micro_batch, x), losses)

    def _input(self, action: Action) -> Tensor | None:
        """What F reads."""
        x = self.messages.receive(action)
        return None if x is None else x.requires_grad_()

    def _leave(self, action: Action, x: Tensor | None, y: Tensor, losses: dict[int, Tensor]) -> None:
        """Sends what F has computed, and keeps what its backward needs."""
        stage, micro_batch = action.stage, action.micro_batch
        if (key := sent_by(action, self.stages.count)) is None:
            losses[micro_batch] = y.detach()
            self._live[stage, micro_batch] = x, y
        else:
            self.messages.send(key, y.detach())
            self._live[stage, micro_batch] = x, get_gradient_edge(y) if y.requires_grad else None
        self.peak_live = max(self.peak_live, len(self._live) + len(self._later))

    def _backward(self, action: Action, scale: Callable[[int], Tensor | float]) -> None:
        grad = self.messages.receive(action)
        self._compute(action)
        x, y = self._live.pop((action.stage, action.micro_batch))
        self._run_backward(action, y, grad, scale)
        self._leave_gradient(action, x)

    def _run_backward(
        self, action: Action, y: Tensor | GradientEdge | None, grad: Tensor | None,
        scale: Callable[[int], Tensor | float],
    ) -> None:  # fmt: skip
        if y is None:
            return
        if self.queue is not None:
            # B computes them at once. Until W, shards take less memory.
            self.queue.keep_gathered = action.kind == "B"
        torch.autograd.backward(y * scale(action.micro_batch) if isinstance(y, Tensor) else y, grad)

    def _leave_gradient(self, action: Action, x: Tensor | None) -> None:
        """Sends the gradient of a stage's input, and computes or keeps what is left of the backward."""
        stage, micro_batch = action.stage, action.micro_batch
        if x is not None:
            assert x.grad is not None
            self.messages.send(Key("B", stage - 1, micro_batch), x.grad)
        if action.kind == "B":
            self.messages.reach(Place(action, weights=True))
        for observer in self.observers:
            observer.input_gradient(action)
        if self.queue is None:
            return
        later = self.queue.dw_builder()
        if action.kind == "B":
            later()
            return
        self._later[stage, micro_batch] = later
        self.peak_deferred = max(self.peak_deferred, len(self._later))

    def _pair(
        self, first: Action, second: Action, forward: Forward, scale: Callable[[int], Tensor | float],
        losses: dict[int, Tensor],
    ) -> None:  # fmt: skip
        """F and B together."""
        x, grad = self._input(first), self.messages.receive(second)
        for action in (first, second):
            self._compute(action)
        x_second, y_second = self._live.pop((second.stage, second.micro_batch))
        y, _ = together(
            lambda: forward(first.stage, first.micro_batch, x),
            lambda: self._run_backward(second, y_second, grad, scale),
        )
        self._leave(first, x, y, losses)
        self._leave_gradient(second, x_second)
