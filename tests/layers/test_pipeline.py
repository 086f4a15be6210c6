"""torch.distributed.pipelining over the layers: backwards that are split into input and weight gradients."""

import pytest
import torch

from support import pipeline, pipeline_fsdp
from support.distributed import ranks


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


@pytest.mark.parametrize("schedule", pipeline_fsdp.SCHEDULES)
@pytest.mark.parametrize("kind", pipeline.LAYERS)
def test_zero_bubble_schedules_over_fsdp_equal_one_process(kind, schedule):
    grads, losses = pipeline_fsdp.one_process(kind)
    results = ranks(4).run(pipeline_fsdp.step, kind, schedule)
    for name, grad in grads.items():
        held = [own[name] for own, _ in results if name in own]
        assert len(held) == pipeline_fsdp.DATA, name
        for own in held:
            torch.testing.assert_close(own, grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    reported = [own for _, own in results if own]
    assert reported
    torch.testing.assert_close(reported[0], losses, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("reshard_after_forward", [False, True])
@pytest.mark.parametrize("kind", pipeline.LAYERS)
def test_weight_halves_read_no_parameter_that_fsdp_has_freed(kind, reshard_after_forward):
    grads = pipeline_fsdp.halves_of_one_process(kind)
    for own in ranks(2).run(pipeline_fsdp.halves, kind, reshard_after_forward):
        assert own.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(own[name], grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
