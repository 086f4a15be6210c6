"""Ranks that disagree about a call of a linear, what they choose alike, and which transport they use."""

import unittest.mock
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel_ops import all_gather_linear, linear_reduce_scatter
from parallel_ops.comm.transport.c10d import C10dTransport
from parallel_ops.tensor_parallel import use_transport
from parallel_ops.tensor_parallel.linear import choose as plan
from parallel_ops.tensor_parallel.linear.choose import CANDIDATES
from support.parallelism.parallel_linear import OPS, Counting, integers, leaf, normal, sharded_linear
from support.ranks.distributed import Raised, ranks

groups = pytest.mark.parametrize("size", [2, 3, 4])
kinds = pytest.mark.parametrize("kind", ["column", "row"])

SIZES = {2: [[4, 4], [5, 2]], 3: [[3, 3, 3], [1, 0, 4]], 4: [[2, 2, 2, 2], [4, 1, 0, 3]]}


def mismatched(rank: int, kind: str, what: str):
    """Calls that differ between ranks in a way that no rank can see by itself, or that one rank sees alone."""
    rows, columns, options = 12, 8, {}
    dtype = torch.float32
    if what == "rows":
        rows += 12 * rank
    elif what == "columns":
        columns += rank
    elif what == "dtype":
        dtype = torch.float64 if rank else dtype
    elif what == "overlap":
        options["overlap"] = 1 + rank
    elif what == "sizes":
        options["sizes"] = None if rank else [5] * dist.get_world_size()
    x, weight = torch.randn(rows, columns, dtype=dtype), torch.randn(columns, columns, dtype=dtype)
    if what == "one bad argument" and rank == 0:
        weight = weight[:, :-1]
    if what == "gradients":
        weight.requires_grad_(bool(rank))
    return OPS[kind](x, weight, group=dist.group.WORLD, **options)


@groups
@kinds
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rows", "make different calls"),
        ("columns", "make different calls"),
        ("dtype", "make different calls"),
        ("overlap", "make different calls"),
        ("gradients", "make different calls"),
        ("sizes", "rejected its arguments"),
        ("one bad argument", "rank 0 of the group rejected its arguments"),
    ],
)
def test_disagreement_raises_on_every_rank(size, kind, what, message):
    outcomes = ranks(size).outcomes(mismatched, kind, what)
    assert all(isinstance(o, Raised) and o.type == "ValueError" for o in outcomes), outcomes
    assert any(message in o.message for o in outcomes), [o.message for o in outcomes]


@kinds
def test_a_disagreement_shows_what_was_passed(kind):
    for outcome in ranks(2).outcomes(mismatched, kind, "columns"):
        assert "sizes=[12] * 2" in outcome.message or "sizes=[6] * 2" in outcome.message
        assert "overlap='auto', requires_grad=[False, False] over c10d" in outcome.message
    for outcome in ranks(2).outcomes(mismatched, kind, "overlap"):
        assert "overlap=1," in outcome.message and "overlap=2," in outcome.message


def tasks(rank: int, kind: str, sizes: list[int]) -> list[str]:
    """What a choice of pieces is kept under, forward and backward."""
    seen: list[str] = []

    def choose(task: plan.Product, *_: Any) -> int:
        seen.append(str(task))
        return plan.OFF

    op = all_gather_linear if kind == "column" else linear_reduce_scatter
    rows = sizes[rank] if kind == "column" else sum(sizes)
    x, weight = leaf(normal(rows, 4, seed=rank)), leaf(normal(6, 4, seed=1))
    with unittest.mock.patch.multiple(plan, choose=choose, may_measure=lambda device: True):
        op(x, weight, group=dist.group.WORLD, sizes=sizes, overlap="auto").sum().backward()
    return seen


@groups
@kinds
def test_all_ranks_choose_for_the_same_task_whatever_their_shard(size, kind):
    """Else one could know the answer and another stop to measure, and wait for it."""
    for sizes in SIZES[size]:
        seen = ranks(size).run(tasks, kind, sizes)
        assert all(seen[0] == other for other in seen[1:]) and len(seen[0]) == (1 if kind == "column" else 2)


def over_another_transport(rank: int, everywhere: bool) -> tuple[int, int]:
    """Exchanges over a transport of the caller's, and after it was given up."""
    tensors = [integers(8, 6, seed=1), integers(4, 6, seed=2), None, integers(8, 4, seed=3)]
    Counting.posted, counts = 0, []
    try:
        if everywhere or rank == 0:
            use_transport(dist.group.WORLD, Counting(dist.group.WORLD))
        for _ in range(2):
            sharded_linear(rank, "column", tensors, [4, 4], {"overlap": 2})
            counts.append(Counting.posted)
            use_transport(dist.group.WORLD, None)
    finally:
        use_transport(dist.group.WORLD, None)
    return counts[0], counts[1]


def transport_of_another_group(rank: int) -> None:
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    use_transport(dist.group.WORLD, C10dTransport(alone))


def test_messages_go_over_the_transport_that_was_chosen():
    # Two pieces of the other shard, then x and dx whole.
    assert ranks(2).run(over_another_transport, True) == [(4, 4)] * 2
    outcomes = ranks(2).outcomes(over_another_transport, False)
    assert all(isinstance(o, Raised) and "make different calls" in o.message for o in outcomes)
    for outcome in ranks(2).outcomes(transport_of_another_group):
        assert "use_transport: transport is rank 0 of 1, but group is rank" in outcome.message


def measured(rank: int, kind: str) -> tuple[list[Any], int, bool]:
    """As if a CPU's timings were worth something: (what was chosen, how often was timed, whether results are right)."""
    # The slowest rank's count: 2 chunks.
    seconds = [[1.0, 0.5, 0.9, 0.95], [1.0, 0.99, 0.9, 0.95]][rank]
    timed = []

    def fastest(run: Any, way: int, device: torch.device) -> float:
        run(way)
        timed.append(way)
        return seconds[CANDIDATES.index(way)]

    tensors = [integers(8, 6, seed=1), integers(4, 6, seed=2), None, integers(8, 4, seed=3)]
    want = sharded_linear(rank, kind, tensors, [4, 4], {"overlap": "off"})
    with unittest.mock.patch.multiple(plan, may_measure=lambda device: True, _fastest=fastest):
        results = [sharded_linear(rank, kind, tensors, [4, 4], {}) for _ in range(3)]
    choices = list(plan._measured[dist.group.WORLD].values())
    del plan._measured[dist.group.WORLD]
    right = all(torch.equal(a, b) for got in results for a, b in zip(got, want, strict=True))
    return choices, len(timed), right


@pytest.mark.parametrize("kind", ["column", "row"])
def test_ranks_measure_once_and_choose_alike(kind):
    first, second = ranks(2).run(measured, kind)
    tasks = 2 if kind == "row" else 1  # its backward cuts its gather into pieces too
    assert first == second == ([2] * tasks, len(CANDIDATES) * tasks, True)


def timed_for_real(rank: int) -> bool:
    with unittest.mock.patch.object(plan, "may_measure", return_value=True):
        sharded_linear(
            rank, "row", [integers(8, 6, seed=i) for i in range(2)] + [None, integers(8, 8, seed=3)], [4, 4], {}
        )
    return plan._measured.pop(dist.group.WORLD) is not None


def test_candidates_are_run_to_be_timed():
    assert all(ranks(2).run(timed_for_real))
