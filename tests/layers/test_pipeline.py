"""torch.distributed.pipelining over the layers: backwards that are split into input and weight gradients."""

import pytest
import torch

from support import pipeline
from support.distributed import ranks


def test_a_split_backward_gives_the_gradients_of_a_whole_one():
    whole = ranks(4).run(pipeline.step, "1f1b", False)
    for split, (grads, losses, exchanges) in zip(ranks(4).run(pipeline.step, "zero bubble", False), whole, strict=True):
        assert split[1] == losses
        for name, grad in grads.items():
            assert torch.equal(split[0][name], grad), name
        # Input and weight gradients of a linear are computed apart: of a row-parallel one both need its whole output
        # gradient. Nothing else is walked twice.
        assert split[2]["all_gather_linear"] == exchanges["all_gather_linear"]
        backwards = exchanges["linear_reduce_scatter"] // 2
        assert exchanges["linear_reduce_scatter"] < split[2]["linear_reduce_scatter"] <= 3 * backwards


@pytest.mark.parametrize("schedule", pipeline.SCHEDULES)
def test_weight_gradients_that_a_queue_computes(schedule):
    whole = ranks(4).run(pipeline.step, "1f1b", False)
    for queued, (grads, losses, _) in zip(ranks(4).run(pipeline.step, schedule, True), whole, strict=True):
        assert queued[1] == losses
        for name, grad in grads.items():
            torch.testing.assert_close(queued[0][name], grad, msg=lambda m, n=name: f"{n}: {m}")
