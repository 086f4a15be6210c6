"""A step of a plan's action list on torch's own pipeline runtime, which is private: the peer of ours."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as runtime

from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.pipeline_parallel import Stages, schedule_of
from parallel_ops.pipeline_parallel.cut import cut
from parallel_ops.pipeline_parallel.weight_gradients import defer_weight_gradients
from parallel_ops.planner.plan import Plan
from support.layers import mesh_of
from support.staged import CONFIGS, inputs_of

_KINDS = {"F": runtime.F, "I": runtime.I, "W": runtime.W, "B": runtime.B}


class _Stage(Transformer):
    """One stage, as torch calls it: with the stream and the number of a micro-batch."""

    def __init__(self, config: TransformerConfig, stages: Stages, number: int, inputs: list[dict[str, Any]]) -> None:
        super().__init__(config, stages=stages, pp_rank=number)
        self._number, self._inputs = number, inputs

    def forward(self, stream: Tensor | None = None, micro_batch: Any = None) -> Tensor:  # type: ignore[override]
        given = self._inputs[int(micro_batch)]
        return super().forward(**given, stage=self._number, stream=stream if self._number else None)


def step(rank: int, text: str, kind: str) -> dict[str, Tensor]:
    """The gradients of this rank's stages."""
    plan, config = Plan.parse(text), CONFIGS[kind]
    mesh, inputs = mesh_of(pp=plan.pp), inputs_of(config, plan, 0, False)
    placed = cut(config.num_layers, plan)
    # To torch each stage is a module of its own: a pipeline of as many ranks, some of which are on one.
    alone, schedule, held = Stages(placed.sizes, placed.count), schedule_of(plan), []
    models = {}
    for number in placed.on(rank):
        torch.manual_seed(0)
        model = models[number] = _Stage(config, alone, number, inputs)
        queue = defer_weight_gradients(model)
        assert queue is not None
        last = number == placed.count - 1
        stream = torch.zeros(model.stream_shape(config.seq_length, plan.micro_batch), requires_grad=True)
        out = torch.zeros((), requires_grad=True) if last else stream.detach().clone().requires_grad_()
        given = stream if number else torch.zeros(1)
        shapes: dict[str, Any] = {"input_args": (given,), "output_args": (out,)}
        # With shapes unknown, it runs an extra forward and backward, whose weight gradients would stay in the queue.
        shapes |= {"input_grads": (stream.detach() if number else None,), "output_grads": (out.detach().clone(),)}
        held.append(
            PipelineStage(
                model, number, placed.count, torch.device("cpu"), group=mesh.group("pp"), dw_builder=queue.dw_builder,
                **shapes,
            )
        )  # fmt: skip
    count, is_last = plan.micro_batches, placed.count - 1 in models
    run: Any = runtime._PipelineScheduleRuntime(held, count, loss_fn=lambda y, _: y / count, scale_grads=False)
    run._prepare_schedule_with_comms(
        {
            r: [runtime._Action(a.stage, _KINDS[a.kind], a.micro_batch) for a in order]
            for r, order in enumerate(schedule)
        }
    )
    for stage in run._stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    run._step_microbatches(
        [(torch.zeros(1),) if 0 in models else () for _ in range(count)],
        [{"micro_batch": torch.tensor(number)} for number in range(count)],
        [torch.zeros(1)] * count if is_last else None,
        [] if is_last else None,
        return_outputs=False,
    )
    return {name: p.grad for model in models.values() for name, p in model.named_parameters() if p.grad is not None}
