"""The planner simulates what torch.distributed.pipelining runs: the same actions in the same order on every rank."""

from unittest.mock import MagicMock

import pytest

from parallel_ops.planner.schedules.schedule import actions, chunks

pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")

KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}


def torch_order(name, pp, micro_batches, stages_per_rank):
    """The order that torch computes when a schedule is made, which needs the stages' numbers alone."""
    stages = []
    for chunk in range(stages_per_rank):
        stage = MagicMock(group_size=pp, group_rank=0, num_stages=pp * stages_per_rank, stage_index=chunk * pp)
        stage.is_first, stage.is_last, stage.has_backward = chunk == 0, False, True
        stages.append(stage)
    schedule = pipelining.get_schedule_class(name)(stages, micro_batches, loss_fn=MagicMock())
    orders = []
    for rank in range(pp):
        passes = [
            part for action in schedule.pipeline_order[rank] if action for part in action.sub_actions or (action,)
        ]
        orders.append([(KINDS[p.computation_type.name], p.microbatch_index, p.stage_index) for p in passes])
    return orders


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (8, 24)])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("interleaved", "Interleaved1F1B"),
        ("zb-h1", "InterleavedZeroBubble"),
        ("zb-v", "ZBVZeroBubble"),
        ("dualpipe-v", "DualPipeV"),
    ],
)
def test_the_same_orders(kind, name, pp, micro_batches):
    count = 2 if kind == "interleaved" else 1
    ours = actions(kind, pp, micro_batches, count)
    theirs = torch_order(name, pp, micro_batches, chunks(kind, count))
    assert [[(a.kind, a.micro_batch, a.stage) for a in order] for order in ours] == theirs
