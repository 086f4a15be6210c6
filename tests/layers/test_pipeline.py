"""torch.distributed.pipelining over the layers: backwards that are split into input and weight gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from parallel_ops._internal.distributed import fsdp
from parallel_ops.layers import ParallelTransformerLayer
from support.parallelism import pipeline
from support.parallelism.layers import mesh_of, whole
from support.parallelism.pipeline import LAYERS, Stage, weight_halves
from support.ranks.distributed import ranks

SCHEDULES: dict[str, Any] = {"interleaved": ScheduleInterleavedZeroBubble, "v": ScheduleZBVZeroBubble}


HIDDEN, HEADS, LENGTH, BATCH, MICRO_BATCHES = 16, 4, 6, 16, 8


PIPELINE, DATA, STAGES = 2, 2, 4


def stage_of(kind: str, index: int) -> Stage:
    """The layer of a stage, with norms and biases that do something."""
    torch.manual_seed(index)
    layer = ParallelTransformerLayer(HIDDEN, HEADS, tp_mesh=None, **LAYERS[kind])
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return Stage(layer)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, target = torch.randn(2, DATA, BATCH, LENGTH, HIDDEN, generator=generator).unbind()
    return x, target


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def one_process(kind: str) -> tuple[dict[str, Tensor], list[float]]:
    """(gradients of the mean loss over all data, losses of the first data-parallel rank's micro-batches)."""
    model = nn.Sequential(*(stage_of(kind, index) for index in range(STAGES)))
    losses = []
    for x, target in zip(*data(), strict=True):
        for part, expected in zip(x.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES), strict=True):
            losses.append(loss(model(part), expected))
            (losses[-1] / (MICRO_BATCHES * DATA)).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return grads, [value.item() for value in losses[:MICRO_BATCHES]]


def step(rank: int, kind: str, schedule: str) -> tuple[dict[str, Tensor], list[float]]:
    """The same, of this rank's stages under a schedule: two pipeline-parallel by two data-parallel ranks.

    With reshard_after_forward=True torch's schedules drop gradients without an error: they look for parameters in the
    graph while FSDP2 shows the sharded ones.
    """
    mesh = mesh_of(pp=PIPELINE, dp_shard=DATA)
    pp = mesh.rank("pp")
    mine = (pp, 2 * PIPELINE - 1 - pp) if schedule == "v" else (pp, PIPELINE + pp)
    stages = []
    for index in mine:
        stage = stage_of(kind, index)
        for module in (stage.layer, stage):
            fully_shard(module, mesh=mesh["fsdp"], reshard_after_forward=False)
        stages.append(PipelineStage(stage, index, STAGES, torch.device("cpu"), group=mesh.group("pp")))
    run = SCHEDULES[schedule](stages, n_microbatches=MICRO_BATCHES, loss_fn=loss)
    x, target = (t[mesh.rank("dp")] for t in data())
    losses: list[Tensor] = []
    run.step(*((x,) if 0 in mine else ()), target=target, losses=losses)
    grads = {
        f"{stage.stage_index}.{name}": whole(p.grad)
        for stage in stages
        for name, p in stage.submod.named_parameters()
        if p.grad is not None
    }
    return grads, [value.item() for value in losses]


def halves(rank: int, kind: str, reshard: bool) -> dict[str, Tensor]:
    """The gradients of one layer over two data-parallel ranks, both halves of each backward run by hand.

    FSDP2 frees the gathered parameters at the end of each input half; the weight halves run after all of them.
    """
    mesh = mesh_of(dp_shard=DATA)
    stage = stage_of(kind, 0)
    fully_shard(stage, mesh=mesh["fsdp"], reshard_after_forward=reshard)
    stage.set_requires_gradient_sync(False)
    x, target = (t[rank].chunk(MICRO_BATCHES)[:2] for t in data())
    started = []
    for part, expected in zip(x, target, strict=True):
        started.append((loss(stage(part.requires_grad_()), expected), part))
    groups: list[Any] = []
    for value, part in started:
        stage.unshard()
        parameters = list(stage.parameters())
        groups.append(stage_backward_input([value], None, [part], iter(parameters))[1])
        assert all(p.untyped_storage().nbytes() == 0 for p in parameters)
    for group in groups:
        stage_backward_weight(iter(parameters), group)
    fsdp.reduce(stage, replicas=True)
    fsdp.finish(stage)
    return {name: whole(p.grad) for name, p in stage.named_parameters() if p.grad is not None}


def halves_of_one_process(kind: str) -> dict[str, Tensor]:
    """The same on one process, in whole backwards."""
    stage = stage_of(kind, 0)
    for x, target in zip(*data(), strict=True):
        for part, expected in zip(x.chunk(MICRO_BATCHES)[:2], target.chunk(MICRO_BATCHES)[:2], strict=True):
            (loss(stage(part), expected) / DATA).backward()
    return {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}


@weight_halves
@pytest.mark.parametrize("kind", pipeline.LAYERS)
def test_a_split_backward_gives_the_gradients_of_a_whole_one(kind):
    whole = ranks(4).run(pipeline.step, "1f1b", False, kind)
    split_ranks = ranks(4).run(pipeline.step, "zero bubble", False, kind)
    for split, (grads, losses, exchanges) in zip(split_ranks, whole, strict=True):
        assert split[1] == losses
        for name, grad in grads.items():
            assert torch.equal(split[0][name], grad), name
        # Input and weight gradients of a linear are computed apart: of a row-parallel one both need its whole output
        # gradient. Nothing else is walked twice.
        assert split[2]["all_gather_linear"] == exchanges["all_gather_linear"]
        backwards = exchanges["linear_reduce_scatter"] // 2
        assert exchanges["linear_reduce_scatter"] < split[2]["linear_reduce_scatter"] <= 3 * backwards


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("kind", [*pipeline.LAYERS, "experts"])
def test_no_weight_half_leads_to_another(kind, sequence_parallel):
    """torch runs the ops that read one group of parameters together, each from the gradient that its input half kept.

    An op that leads to another of the group would be run for that one's gradient too, which is there already.
    """
    assert ranks(2).run(pipeline.chained_groups, kind, sequence_parallel) == [[], []]


@pytest.mark.parametrize("schedule", pipeline.SCHEDULES)
def test_weight_gradients_that_a_queue_computes(schedule):
    whole = ranks(4).run(pipeline.step, "1f1b", False)
    for queued, (grads, losses, _) in zip(ranks(4).run(pipeline.step, schedule, True), whole, strict=True):
        assert queued[1] == losses
        for name, grad in grads.items():
            torch.testing.assert_close(queued[0][name], grad, msg=lambda m, n=name: f"{n}: {m}")


@weight_halves
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", pipeline.LAYERS)
def test_zero_bubble_schedules_over_fsdp_equal_one_process(kind, schedule):
    grads, losses = one_process(kind)
    results = ranks(4).run(step, kind, schedule)
    for name, grad in grads.items():
        held = [own[name] for own, _ in results if name in own]
        assert len(held) == DATA, name
        for own in held:
            torch.testing.assert_close(own, grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    reported = [own for _, own in results if own]
    assert reported
    torch.testing.assert_close(reported[0], losses, rtol=1e-6, atol=0.0)


@weight_halves
@pytest.mark.parametrize("reshard_after_forward", [False, True])
@pytest.mark.parametrize("kind", pipeline.LAYERS)
def test_weight_halves_read_no_parameter_that_fsdp_has_freed(kind, reshard_after_forward):
    grads = halves_of_one_process(kind)
    for own in ranks(2).run(halves, kind, reshard_after_forward):
        assert own.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(own[name], grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
