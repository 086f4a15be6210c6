"""The forwards and backwards of a step: one micro-batch after another, or through the stages of a pipeline."""

import abc
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from parallel_ops._internal.dropout import seed_generators
from parallel_ops.comm import ParallelMesh
from parallel_ops.models import Transformer
from parallel_ops.pipeline_parallel import Observer, Pipeline
from parallel_ops.pipeline_parallel.trace import Recorder, Timed, gathered
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.schedules.action import Action
from parallel_ops.train.data.batches import Batch
from parallel_ops.train.launch.watchdog import Activity
from parallel_ops.train.offload import ActivationOffload
from parallel_ops.train.parallelize_model import PRECISIONS, micro_batch

_TEXTS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step on this rank, an element for each micro-batch.

    Attributes:
        batches: The data. counts: Their numbers of targets.
        shares: Share of each micro-batch in the loss of the step. factors: Factor of the gradients of each.
        seeds: Dropout seed of each; ``None`` leaves the random generators as they are.
        scale: The loss scale, which ``factors`` include.
    """

    batches: Sequence[Batch]
    counts: Sequence[int]
    shares: Sequence[Tensor | float]
    factors: Sequence[Tensor | float]
    seeds: Sequence[int | None]
    scale: Tensor | float

    def micro_batches(self) -> Iterator[tuple[Batch, int, Tensor | float, Tensor | float, int | None]]:
        """Batch, count, share, factor and seed of each micro-batch."""
        return zip(self.batches, self.counts, self.shares, self.factors, self.seeds, strict=True)


class ForwardBackward(abc.ABC):
    """Runs the micro-batches of a step on this rank.

    Args:
        model: The parallelized model. mesh, plan: Its ranks and plan.
        activity: Receives a description of each pass.
        documents: Samples have positions and boundaries of documents.
    """

    def __init__(
        self, model: nn.Module, mesh: ParallelMesh, plan: Plan, device: torch.device, activity: Activity,
        documents: bool,
    ) -> None:  # fmt: skip
        self.model, self.mesh, self.plan, self.device, self.activity = model, mesh, plan, device, activity
        self._documents = documents
        dtype = PRECISIONS[plan.dtype]
        # FSDP2 and replicate cast the parameters that they manage; without them autocast casts op by op.
        enabled = not isinstance(model, FSDPModule) and dtype is not torch.float32
        self.autocast = functools.partial(torch.autocast, device.type, dtype=dtype, enabled=enabled)

    @abc.abstractmethod
    def run(self, given: StepInputs, what: str, *, slow: bool) -> Tensor:
        """Computes gradients, complete over all ranks.

        Args:
            what, slow: Text and limit of the activities.

        Returns:
            This rank's share of the loss of the step, a scalar.
        """

    @abc.abstractmethod
    def evaluate(self, batches: Sequence[Batch], counts: Sequence[int], what: str, *, slow: bool) -> Tensor:
        """Computes losses without gradients; the model is in eval mode.

        Args:
            batches: Any number of micro-batches. counts: Number of targets of each. what, slow: See ``run``.

        Returns:
            The sum of the losses of all targets, and their number, float64 ``[2]``; zeros where the loss is computed on
            another pipeline rank.
        """

    def _sums(self, losses: Iterable[tuple[Tensor, int]]) -> Tensor:
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for loss, count in losses:
            if count:  # a mean over no targets may be NaN
                total[0] += loss.double() * count
            total[1] += count
        return total

    def total_norm(self) -> Callable[[], Tensor] | None:
        """Returns the norm of the gradients of all ranks, where that of this rank's parameters is only a part."""
        return None

    def _inputs(
        self, batch: Batch, count: int, seed: int | None = None, factor: Tensor | float | None = None
    ) -> dict[str, Any]:
        """Arguments of the model. ``seed``, ``factor``: of dropout and of gradients, in training."""
        # A micro-batch without targets has weight 0, and a mean over no targets may be NaN: use any targets.
        found: dict[str, Any] = {"tokens": batch.tokens, "targets": batch.targets if count else batch.tokens}
        if self._documents:
            found |= {"positions": batch.positions, "cu_seqlens": batch.cu_seqlens}
        if batch.layout is not None:
            found["layout"] = batch.layout
        if batch.cp_ranks is not None:
            found["cp_ranks"] = batch.cp_ranks
        if factor is not None and isinstance(self.model, Transformer):
            found |= {"dropout_seed": seed, "aux_scale": factor}
        return found


class NoPipeline(ForwardBackward):
    """One stage: the forward and the backward of each micro-batch."""

    def run(self, given: StepInputs, what: str, *, slow: bool) -> Tensor:
        total = torch.zeros((), device=self.device)
        for number, (batch, count, share, factor, seed) in enumerate(given.micro_batches()):
            micro_batch(self.model, self.plan.zero, last=number == len(given.batches) - 1)
            part = f"{what}, micro-batch {number + 1} of {len(given.batches)}"
            self.activity(f"{part}, forward", slow=slow)
            inputs = self._inputs(batch.to(self.device), count, seed, factor)
            tokens, targets = inputs.pop("tokens"), inputs.pop("targets")
            if seed is not None:
                seed_generators(seed, self.device)  # of models that take no seed
            with self.autocast():
                loss: Tensor = self.model(tokens, targets, **inputs)
            self.activity(f"{part}, backward", slow=slow)
            (loss * factor).backward()
            total += loss.detach() * share
        return total

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], counts: Sequence[int], what: str, *, slow: bool) -> Tensor:
        losses = []
        for number, (batch, count) in enumerate(zip(batches, counts, strict=True)):
            self.activity(f"{what}, micro-batch {number + 1} of {len(batches)}", slow=slow)
            inputs = self._inputs(batch.to(self.device), count)
            tokens, targets = inputs.pop("tokens"), inputs.pop("targets")
            with self.autocast():
                losses.append((self.model(tokens, targets, **inputs), count))
        return self._sums(losses)


class PipelineForwardBackward(ForwardBackward):
    """A pipeline."""

    def __init__(
        self, model: nn.Module, mesh: ParallelMesh, plan: Plan, device: torch.device, activity: Activity,
        documents: bool, *, split: bool,
    ) -> None:  # fmt: skip
        super().__init__(model, mesh, plan, device, activity, documents)
        managed = isinstance(model, FSDPModule)
        dtype = PRECISIONS[plan.dtype] if managed else next(model.parameters()).dtype
        self._report, self._recorder = _Report(activity), Recorder(device)
        offload = getattr(model, "activation_offload", None)
        self.pipeline = Pipeline(
            model, mesh, plan, split=split, dtype=dtype,
            observers=[self._report, self._recorder, *([] if offload is None else [_Offload(offload)])],
        )  # fmt: skip

    def run(self, given: StepInputs, what: str, *, slow: bool) -> Tensor:
        self._report.step, self._report.slow = what, slow
        if (seed := given.seeds[0]) is not None:
            seed_generators(seed, self.device)  # of models that take no seed
        inputs = [
            self._inputs(batch.to(self.device), count, seed, factor)
            for batch, count, _, factor, seed in given.micro_batches()
        ]
        losses = self.pipeline.step(inputs, given.factors.__getitem__, around=self.autocast)
        return sum((loss * given.shares[n] for n, loss in losses.items()), torch.zeros((), device=self.device))

    def evaluate(self, batches: Sequence[Batch], counts: Sequence[int], what: str, *, slow: bool) -> Tensor:
        self._report.step, self._report.slow = what, slow
        inputs = [self._inputs(batch.to(self.device), n) for batch, n in zip(batches, counts, strict=True)]
        losses = self.pipeline.evaluate(inputs, around=self.autocast)
        return self._sums((loss, counts[number]) for number, loss in losses.items())

    def total_norm(self) -> Callable[[], Tensor]:
        return self.pipeline.total_norm

    def record(self) -> None:
        """Starts a step to be traced: all ranks of the pipeline start it together."""
        self._recorder.restart(self.pipeline.group)

    def timed(self) -> list[list[Timed]]:
        """The times of the last step on all ranks of the pipeline."""
        return gathered(self._recorder.timed(), self.pipeline.group)


class _Report(Observer):
    """Describes the actions of a pipeline as activities of this rank."""

    def __init__(self, activity: Activity) -> None:
        self._activity, self.step, self.slow = activity, "", False

    def begin(self, action: Action) -> None:
        if action.kind != "W":
            self._activity(f"{self._place(action)}, waiting for it", slow=self.slow, waits=True)

    def compute(self, action: Action) -> None:
        self._activity(f"{self._place(action)}, {_TEXTS[action.kind]}", slow=self.slow)

    def _place(self, action: Action) -> str:
        return f"{self.step}, stage {action.stage}, micro-batch {action.micro_batch + 1}"


class _Offload(Observer):
    """Activations of a micro-batch come back while its backward waits for a message."""

    def __init__(self, offload: ActivationOffload) -> None:
        self._offload = offload

    def begin(self, action: Action) -> None:
        if action.kind in "IB":
            self._offload.expect((action.stage, action.micro_batch))

    def compute(self, action: Action) -> None:
        if action.kind == "F":
            self._offload.begin((action.stage, action.micro_batch))


def forward_backward_of(
    model: nn.Module, mesh: ParallelMesh, plan: Plan, device: torch.device, activity: Activity, *, documents: bool,
    split: bool,
) -> ForwardBackward:  # fmt: skip
    """The passes of a plan. ``split``: see ``Pipeline``."""
    given = model, mesh, plan, device, activity, documents
    return PipelineForwardBackward(*given, split=split) if plan.pp > 1 else NoPipeline(*given)
