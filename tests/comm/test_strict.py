"""Every op over a group, and whole steps of the trainer, make no call that NCCL would lock up."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("pydantic")

from support.numerics import every_op
from support.ranks.distributed import Raised, ranks
from support.runs import trainer as runs
from support.transports import strict


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return runs.data_file(tmp_path_factory.mktemp("data"))


MODES = pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])


def receives_first(rank):
    group, buffers = dist.group.WORLD, (torch.zeros(1), torch.ones(1))
    works = (
        dist.irecv(buffers[0], group=group, group_src=1 - rank),
        dist.isend(buffers[1], group=group, group_dst=1 - rank),
    )
    for work in works:
        work.wait()


def ends_alone(rank):
    """A group's first call, by two of its three ranks, before a call of another group."""
    other = dist.new_group()
    if rank != 1:
        operations = [
            dist.P2POp(op, torch.zeros(1), group=dist.group.WORLD, group_peer=2 - rank)
            for op in (dist.isend, dist.irecv)
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    dist.all_reduce(torch.ones(1), group=other)


@MODES
@pytest.mark.parametrize(("size", "function"), [(2, receives_first), (3, ends_alone)])
def test_what_nccl_locks_up_is_found_at_once(size, function, eager):
    results = strict.outcomes(size, function, eager=eager)
    ranks(size).close()
    if function is ends_alone and eager:
        assert not any(isinstance(result, Raised) for result in results), results
    else:
        assert all(isinstance(result, Raised) and result.type == "Deadlock" for result in results), results


@MODES
def test_every_op_over_a_group(eager):
    assert set(every_op.OPS) == every_op.registered()
    strict.run(4, every_op.call, eager=eager)


PLANS = (
    ({"pp": 4, "schedule": "1f1b"}, "gpt"),
    ({"pp": 4, "schedule": "zb-2p", "zero": 0}, "llama"),
    ({"pp": 2, "dp": 2, "zero": 3, "schedule": "gpipe"}, "gpt"),
    ({"pp": 2, "tp": 2, "schedule": "zb-h1", "sequence_parallel": True}, "gpt"),
    ({"pp": 2, "tp": 2, "schedule": "interleaved", "virtual_stages": 2}, "gpt"),
    ({"pp": 2, "cp": 2, "zero": 2, "schedule": "zb-v", "virtual_stages": 2}, "llama"),
    (
        {"pp": 2, "dp": 2, "ep": 2, "zero": 1, "schedule": "dualpipe-v", "virtual_stages": 2, "global_batch": 8},
        "experts",
    ),
    ({"tp": 4, "sequence_parallel": True}, "llama"),
    ({"tp": 2, "cp": 2, "zero": 1}, "llama"),
    ({"cp": 4, "cp_kind": "all_to_all", "zero": 3}, "gpt"),
    ({"dp": 4, "dp_replicate": 2, "zero": 3}, "gpt"),
    ({"dp": 4, "ep": 4, "zero": 2}, "experts"),
    ({"dp": 2, "tp": 2, "ep": 2, "zero": 3}, "experts"),
)


@pytest.mark.parametrize(
    ("plan", "kind", "eager"),
    [
        pytest.param(
            plan, kind, eager, id=" ".join(f"{k}={v}" for k, v in plan.items()) + ("-eager" if eager else "-lazy"),
            marks=[pytest.mark.runs] * (eager == bool(number % 2)),
        )
        for number, (plan, kind) in enumerate(PLANS) for eager in (False, True)
    ],
)  # fmt: skip
def test_steps_of_the_trainer(data, plan, kind, eager):
    """Two steps: first calls, and those behind them."""
    model = {**runs.MODELS[kind], "num_layers": 4 if plan.get("pp") else 2}
    settings = runs.settings_of(data, model=model, parallel={"global_batch": 4, **plan}, run={"steps": 2})
    steps = strict.run(4, runs.steps_of, settings, eager=eager)
    assert all(one == steps[0] for one in steps)
