"""Trains the stages of a model by a plan's schedule, with every other parallelism of the plan.

    pipeline = Pipeline(parallelize(Transformer(config, device="meta"), mesh, plan), mesh, plan)
    losses = pipeline.step(inputs, lambda n: 1 / len(inputs))     # in place of a forward and backward for each input
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, pipeline.total_norm())
    optimizer.step()

The schedule is the planner's list of actions (``parallel_ops.planner.schedules``), so what it draws, simulates and
counts is what runs. DualPipe-V's pairs overlap where ranks share experts (but for ZeRO-3): while one of the two waits
for rows of other ranks, the other computes. Elsewhere they run one after the other.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel_ops._internal.gradients.gradient_norm import total_norm
from parallel_ops.comm import ParallelMesh, primitives
from parallel_ops.comm.errors import published_errors
from parallel_ops.pipeline_parallel.cut import Stages
from parallel_ops.pipeline_parallel.executor import Executor, Forward, Observer
from parallel_ops.pipeline_parallel.link import MATCHED_BY_RANK, GroupLink, connected_link
from parallel_ops.pipeline_parallel.loads import PipelineExpertLoads
from parallel_ops.pipeline_parallel.messages import Messages, pairs_of
from parallel_ops.pipeline_parallel.reduction import Reduction, add_between_ends
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.schedules.action import Schedule, without_pairs
from parallel_ops.planner.schedules.forward_only import forward_only
from parallel_ops.planner.schedules.schedule import actions
from parallel_ops.tensor_parallel import DeferredWeightGradients


class StagedModel(Protocol):
    """What a pipeline needs of a model: the stages of this rank in one module, as ``Transformer`` and ``ModuleChain``.

    Attributes:
        stages: Of the whole model.
        tied_weight: The table that the first and the last stage share, on ranks that have one of them; ``None`` for
            none.
    """

    stages: Stages | None

    @property
    def tied_weight(self) -> nn.Parameter | None: ...
    def stage_blocks(self, stage: int) -> list[nn.Module]: ...
    def loads_of_model(self) -> PipelineExpertLoads | None: ...
    def stream_shape(self, s: int, b: int) -> tuple[int, ...]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def __call__(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        stage: int | None,
        hidden_states: Tensor | None,
        **options: Any,
    ) -> Tensor: ...


def schedule_of(plan: Plan) -> Schedule:
    """The actions of each pipeline rank under a plan.

    Raises:
        ValueError: The schedule cannot run the plan's number of micro-batches.
    """
    found = actions(plan.schedule, plan.pp, plan.micro_batches, plan.virtual_stages)
    # The end of a backward reshards all that FSDP2 has gathered, for the forward beside it, too.
    return found if plan.ep > 1 and plan.zero < 3 else without_pairs(found)


def defer_weight_gradients(model: nn.Module) -> DeferredWeightGradients | None:
    """Makes the linears of a model leave their weight gradients to a queue, and returns it; ``None`` if there are none.

    A linear is any module with an attribute ``deferred``, as ``ColumnParallelLinear`` and ``RowParallelLinear`` have.
    FSDP2 and ``replicate`` may manage the weights: ``Reduction`` reduces them.
    """
    queue, found = DeferredWeightGradients(fsdp=True), False
    for module in model.modules():
        if hasattr(module, "deferred"):
            module.deferred, found = queue, True  # type: ignore[assignment]
    return queue if found else None


class Pipeline:
    """The pipeline of this rank.

    Args:
        model: This rank's stages, a ``StagedModel``, from ``parallelize``.
        mesh: The ranks, all of which construct the pipeline: on GPUs groups are formed.
        plan: The plan of ``parallelize``.
        split: Compute weight gradients apart, after the gradient of a stage's input is sent, as schedules with W need
            it; ``False`` for compiled blocks.
        dtype: Of the residual stream.
        observers: Called with each action as it starts and ends.

    Attributes:
        executor: Runs this rank's list; has what the last step held at most.

    Raises:
        ValueError: The model has no stages, those of another number of ranks, or no linears that ``split`` needs.
    """

    def __init__(
        self, model: nn.Module, mesh: ParallelMesh, plan: Plan, *, split: bool = True,
        dtype: torch.dtype = torch.float32, observers: Sequence[Observer] = (),
    ) -> None:  # fmt: skip
        self.model = cast(StagedModel, model)
        stages: Stages | None = getattr(model, "stages", None)
        if stages is None or stages.pp != plan.pp or mesh.size("pp") != plan.pp:
            raise ValueError(f"Pipeline: the model must have stages for the plan's pp={plan.pp} ranks, as the mesh")
        self.schedule, self.stages, self.rank, self.dtype = schedule_of(plan), stages, mesh.rank("pp"), dtype
        group = mesh.group("pp")
        assert group is not None
        self.group = group
        has_weights = any(action.kind == "W" for order in self.schedule for action in order)
        queue = defer_weight_gradients(model) if split else None
        if queue is None and has_weights:
            raise ValueError(
                f"Pipeline: schedule {plan.schedule!r} computes weight gradients apart, which compiled blocks and "
                "models without the package's linears cannot; take '1f1b', 'interleaved' or 'gpipe'"
            )
        self._share = None if plan.sequence_parallel or not plan.scatter_gather else mesh.group("tp")
        ends = stages.rank_of(0), stages.rank_of(stages.count - 1)
        tied = self.model.tied_weight is not None and self.rank in ends
        self._tied_with = next(iter(set(ends) - {self.rank}), None) if tied else None
        self._counted_elsewhere = self._tied_with is not None and self.rank == ends[1]
        self._link = self._connected(mesh, ends)
        self._loads = self.model.loads_of_model()
        self.messages = Messages(
            self.schedule, stages, self.rank, self._link, share=self._share, piggyback=self._loads
        )  # fmt: skip
        blocks = {stage: self.model.stage_blocks(stage) for stage in stages.on(self.rank)}
        self._reduction = Reduction(model, blocks, plan.zero)
        self.executor = Executor(
            self.schedule, stages, self.rank, self.messages, queue=queue, observers=[*observers, self._reduction]
        )

    def _connected(self, mesh: ParallelMesh, ends: tuple[int, int]) -> GroupLink:
        """The link of this rank, connected with all ranks that it will talk to."""
        device = torch.device(mesh.root.device_type)
        if device.type in MATCHED_BY_RANK:
            return GroupLink(self.group)
        pairs = pairs_of(self.schedule, self.stages)
        # Only the ends know whether they share a table. As the group's first call, this has all its ranks.
        tied = torch.tensor(float(self._tied_with is not None), device=device)
        if primitives.all_reduce(tied, True, self.group.group_name, "tied embeddings").item():
            pairs |= {ends, ends[::-1]}
        return connected_link(self.group, mesh.pipelines, pairs, device)

    def step(
        self,
        inputs: Sequence[Mapping[str, Any]],
        scale: Callable[[int], Tensor | float],
        *,
        around: Callable[[], Any] | None = None,
    ) -> dict[int, Tensor]:
        """Runs all micro-batches, forward and backward, and reduces gradients. All ranks call it.

        Args:
            inputs: Of each micro-batch, the same on all stages: ``tokens``, ``targets`` and further arguments of the
                model by name.
            scale: Returns the factor of a micro-batch's loss, of which the gradients are taken.
            around: Returns the context of each forward, such as autocast.

        Returns:
            The loss of each micro-batch on ranks with the last stage; empty elsewhere.

        Raises:
            TypeError: An input is no mapping, or has no tokens. ValueError: There are other inputs than micro-batches
                of the schedule, or their tokens differ in shape or are not ``[s, b]``.
            PeerError: A rank of the pipeline is lost; names the message that did not arrive.
        """
        if len(inputs) != (expected := 1 + max(action.micro_batch for action in self.schedule[self.rank])):
            raise ValueError(f"Pipeline: inputs must have {expected} micro-batches, got {len(inputs)}")
        messages = self._messages_of(inputs)
        self._reduction.start()
        tied, before = self.model.tied_weight, None
        if self._tied_with is not None and tied is not None:
            before, tied.grad = tied.grad, None  # of earlier steps: already the sum of both ends
        if self._loads is not None:
            self._loads.begin(inputs[0]["tokens"].device)
        with published_errors(self.group):
            losses = self.executor.step(self._forward(inputs, around), scale, **messages)
        self._reduction.end()
        if self._tied_with is not None and tied is not None and (grad := tied.grad) is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            add_between_ends(local, self._link, self.rank, self._tied_with)
            tied.grad = grad if before is None else before.add_(grad)
        return losses

    @torch.no_grad()
    def evaluate(
        self, inputs: Sequence[Mapping[str, Any]], *, around: Callable[[], Any] | None = None
    ) -> dict[int, Tensor]:
        """The loss of each micro-batch without gradients. All ranks call it; the caller puts the model in eval mode.

        Args:
            inputs, around: As ``step`` takes them, of any number of micro-batches.

        Returns:
            As ``step`` does.
        """
        stages = self.stages
        schedule = forward_only(stages.pp, stages.count, stages.rank_of, len(inputs))
        messages = Messages(schedule, stages, self.rank, self._link, share=self._share)
        with published_errors(self.group):
            return self.executor.evaluate(
                schedule[self.rank], messages, self._forward(inputs, around), **self._messages_of(inputs)
            )

    def _forward(self, inputs: Sequence[Mapping[str, Any]], around: Callable[[], Any] | None) -> Forward:
        loads = self._loads if torch.is_grad_enabled() else None

        def forward(stage: int, micro_batch: int, hidden_states: Tensor | None) -> Tensor:
            with contextlib.nullcontext() if around is None else around():
                more: dict[str, Any] = {} if loads is None else {"aux_loads": loads.place(stage, micro_batch)}
                return self.model(**inputs[micro_batch], stage=stage, hidden_states=hidden_states, **more)

        return forward

    def _messages_of(self, inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Shape, dtype and device of the messages of a step."""
        for given in inputs:
            if not isinstance(given, Mapping) or not isinstance(given.get("tokens"), Tensor):
                got = list(given) if isinstance(given, Mapping) else type(given).__name__
                raise TypeError(f"Pipeline: inputs must be mappings with a tensor 'tokens', got {got}")
        shapes = {tuple(given["tokens"].shape) for given in inputs}
        if len(shapes) != 1 or len(min(shapes)) != 2:
            raise ValueError(f"Pipeline: inputs must have tokens of one shape [s, b], got {sorted(shapes)}")
        tokens = inputs[0]["tokens"]
        return {"shape": self.model.stream_shape(*tokens.shape), "dtype": self.dtype, "device": tokens.device}

    def total_norm(self) -> Tensor:
        """The 2-norm of all gradients of all stages, a scalar, the same on every rank. A shared table counts once."""
        twice = self.model.tied_weight if self._counted_elsewhere else None
        norm = total_norm(p.grad for p in self.model.parameters() if p.grad is not None and p is not twice)
        squares = norm.to(next(self.model.parameters()).device).square()
        return primitives.all_reduce(squares, True, self.group.group_name, "gradient norm").sqrt()
