"""A step as one CUDA graph: forwards, backwards, reductions and update are captured once, then replayed.

    inputs of a step    copied into tensors that stay where they are: tokens, targets, factors, learning rates
    steps 1 to 3        eager, on the stream of the capture: kernels are compiled, groups connected, workspaces made
    step 4              captured, which computes nothing, then replayed
    later steps         replayed; the host launches one graph where it launched thousands of kernels

A graph repeats addresses and numbers of the host, so nothing of a step may depend on a number of the host that changes,
and nothing may be read by the host. ``capturable`` knows the settings where that is not so. Loss, norm and the use of
experts are read after the replay, as after an eager step.

Dropless experts of several ranks exchange numbers of rows that the host reads. These steps send them through a capacity
instead (``checked_capacity``), and count on the device what it drops on any rank. If anything is dropped, the step
changes no parameter, all ranks read so after it, and take it again: eagerly, without a capacity, of the same inputs.

Sources: torch's notes on CUDA graphs (whole-network capture: warm-up on a side stream, static inputs, optimizers with
``capturable``); Megatron-LM's ``full_cuda_graph`` (one graph for all micro-batches; ``thread_local``, since other
threads, such as NCCL's watchdog and the loader, query events and allocate pinned memory meanwhile).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from parallel_ops.layers import ParallelMoE
from parallel_ops.train.data.batches import Batch
from parallel_ops.train.step.capturable import WARMUP
from parallel_ops.train.step.expert_use import overflowed
from parallel_ops.train.step.forward_backward import StepInputs

Results = tuple[Tensor, Tensor, Tensor | None]


class StepGraph:
    """Takes the steps of a run by replays of one CUDA graph. All ranks use it alike.

    Args:
        optimizer: Its groups have the step's learning rate as ``lr`` when a step begins.
        capacity: Of ``checked_capacity``; the same on all ranks.

    Attributes:
        redone: The last step was taken again, without the capacity.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, model: nn.Module, capacity: float | None
    ) -> None:
        self._optimizer, self._device, self.capacity, self.redone = optimizer, device, capacity, False
        self._experts = [module for module in model.modules() if isinstance(module, ParallelMoE)]
        self._stream = torch.cuda.Stream(device)
        self._rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self.reset()

    def reset(self) -> None:
        """Forgets the graph and frees its memory: the next steps warm up and capture anew.

        Called before process groups end, for NCCL waits for graphs that have its calls.
        """
        self._graph: Any = None
        self._static: StepInputs | None = None
        self._results: Results | None = None
        self._eager_steps, self._state = 0, self._optimizer.state

    def step(self, given: StepInputs, compute: Callable[[StepInputs], Results]) -> Results:
        """Takes one step.

        Args:
            compute: Takes a step; must use nothing of it but the inputs, the model and the optimizer. With a capacity
                it must change nothing where ``overflowed`` says so of the use of experts that it returns.

        Returns:
            What ``compute`` returns, valid until the next step.

        Raises:
            RuntimeError: The step does something that cannot be captured.
        """
        loaded = self._state is not self._optimizer.state  # ``load_state_dict`` replaces the tensors
        if self._static is None or loaded or _shapes(given) != _shapes(self._static):
            self.reset()
            self._static = _like(given, self._device)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            _fill(self._static, given)
            for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
                rate.fill_(group["lr"])
            if self._graph is not None:
                self._graph.replay()
            elif self._eager_steps < WARMUP:
                self._eager_steps += 1
                with self._rates_on_device(capturable=False), self._through_capacity():
                    self._results = compute(self._static)
            else:
                self._graph = self._captured(self._static, compute)
                self._graph.replay()
            assert self._results is not None
            results, use = self._results, self._results[-1]
            self.redone = self.capacity is not None and use is not None and bool(overflowed(use))
            if self.redone:  # as if there were no graph: with the numbers of the host
                results = compute(given)
        current.wait_stream(self._stream)
        return results

    def _captured(self, static: StepInputs, compute: Callable[[StepInputs], Results]) -> Any:
        graph = torch.cuda.CUDAGraph()
        self._results = None  # of the last warm-up step
        try:
            with (
                self._rates_on_device(capturable=True),
                self._through_capacity(),
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                self._results = compute(static)
        except Exception as error:
            raise RuntimeError(
                f"run.cuda_graph: this step cannot be captured in a CUDA graph: {error}; set run.cuda_graph = false"
            ) from error
        return graph

    @contextlib.contextmanager
    def _through_capacity(self) -> Iterator[None]:
        for moe in self._experts:
            moe.checked_capacity = self.capacity
        try:
            yield
        finally:
            for moe in self._experts:
                moe.checked_capacity = None

    @contextlib.contextmanager
    def _rates_on_device(self, *, capturable: bool) -> Iterator[None]:
        """The optimizer reads learning rates from tensors in the block."""
        groups = self._optimizer.param_groups
        before = [(group["lr"], group["capturable"]) for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"], group["capturable"] = rate, capturable
        try:
            yield
        finally:
            for group, (rate, kept) in zip(groups, before, strict=True):
                group["lr"], group["capturable"] = rate, kept


def _shapes(given: StepInputs) -> list[torch.Size]:
    return [batch.tokens.shape for batch in given.batches]


def _like(given: StepInputs, device: torch.device) -> StepInputs:
    """Inputs of the same sizes that stay where they are, undefined."""

    def scalars() -> list[Tensor]:
        return [torch.zeros((), device=device) for _ in given.batches]

    batches = [
        Batch(torch.empty_like(batch.tokens, device=device), torch.empty_like(batch.targets, device=device))
        for batch in given.batches
    ]
    # Whether targets count is decided for each step by ``_fill``; nothing is drawn.
    return StepInputs(
        batches, counts=[1] * len(batches), shares=scalars(), factors=scalars(), seeds=[None] * len(batches),
        scale=torch.ones((), device=device),
    )  # fmt: skip


def _fill(static: StepInputs, given: StepInputs) -> None:
    """Puts the values of a step into static inputs. The host does not wait."""
    for to, batch, count in zip(static.batches, given.batches, given.counts, strict=True):
        to.tokens.copy_(batch.tokens, non_blocking=True)
        # See ``ForwardBackward``: a micro-batch without targets uses any.
        to.targets.copy_(batch.targets if count else batch.tokens, non_blocking=True)
    scalars = zip(
        (*static.shares, *static.factors, static.scale), (*given.shares, *given.factors, given.scale), strict=True
    )
    for target, value in scalars:
        assert isinstance(target, Tensor)
        target.copy_(value) if isinstance(value, Tensor) else target.fill_(value)
