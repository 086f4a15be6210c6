import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_ops import sort_by_expert
from parallel_ops.ops import sort_by_expert_reference
from support.numerics import suite
from support.numerics.experts import random_experts
from support.numerics.suite import DEVICES, refuses

pytestmark = pytest.mark.parametrize("device", DEVICES)
ops = torch.ops.parallel_ops


def check_order(order, experts, n, capacity, multiple):
    """What the fields promise, by walking through them."""
    t, k = experts.shape
    rows, places, offs = (f.tolist() for f in order)
    ids = experts.flatten().tolist()
    assert [f.dtype for f in order] == [torch.int32] * 3
    assert len(rows) == (n * capacity if capacity is not None else (t * k + n * (multiple - 1)) // multiple * multiple)
    slots = {e: [s for s, id_ in enumerate(ids) if id_ == e] for e in range(n)}
    start = 0
    for e in range(n):
        kept = slots[e] if capacity is None else slots[e][:capacity]
        padded = -(-len(kept) // multiple) * multiple if capacity is None else capacity
        assert offs[e] == start + padded
        assert rows[start : offs[e]] == kept + [-1] * (padded - len(kept))
        for i, slot in enumerate(kept):
            assert places[slot // k][slot % k] == start + i
        for slot in slots[e][len(kept) :]:
            assert places[slot // k][slot % k] == -1
        start = offs[e]
    assert rows[start:] == [-1] * (len(rows) - start)
    assert (order.places[experts == -1] == -1).all()


@given(
    t=st.integers(0, 60),
    k=st.integers(1, 9),
    n=st.sampled_from([1, 2, 7, 64, 300]),
    capacity=st.sampled_from([None, None, 0, 1, 4, 100]),
    multiple=st.sampled_from([1, 1, 4, 16, 128]),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    absent=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_order(device, t, k, n, capacity, multiple, dtype, absent, strided, seed):
    if capacity is not None and capacity % multiple:
        multiple = 1
    experts = random_experts(t, k, n, seed=seed, absent=absent, device=device).to(dtype)
    given = torch.stack([experts, experts], dim=-1)[..., 0] if strided else experts
    order = sort_by_expert(given, n, capacity=capacity, multiple=multiple)
    check_order(order, experts, n, capacity, multiple)
    reference = sort_by_expert_reference(experts, n, capacity=capacity, multiple=multiple)
    assert all(torch.equal(a, b) for a, b in zip(order, reference, strict=True))


@pytest.mark.parametrize(("t", "k", "n"), [(20000, 8, 1024), (70000, 1, 3), (3, 5000, 2)])
def test_large(device, t, k, n):
    experts = random_experts(t, k, n, absent=True, device=device)
    order, reference = (f(experts, n, multiple=16) for f in (sort_by_expert, sort_by_expert_reference))
    assert all(torch.equal(a, b) for a, b in zip(order, reference, strict=True))


def test_custom_op_contract(device):
    experts = random_experts(6, 3, 8, device=device)
    for capacity, multiple in ((None, 1), (None, 4), (2, 1)):
        suite.check_op(ops.sort_by_expert.default, [experts, 8, capacity, multiple])


def test_compiles_to_one_graph_for_all_sizes(device):
    torch._dynamo.reset()
    compiled = torch.compile(sort_by_expert, fullgraph=True, dynamic=True, backend="aot_eager")
    for t in (4, 6, 9):
        experts = random_experts(t, 3, 8, device=device)
        for a, b in zip(compiled(experts, 8, multiple=4), sort_by_expert(experts, 8, multiple=4), strict=True):
            assert torch.equal(a, b)


def test_ids_out_of_range(device):
    for wrong in (3, -2, 2**40):
        experts = torch.tensor([[0, 1], [2, wrong]], device=device)
        if device == "cpu":
            with pytest.raises(ValueError, match=rf"experts must hold ids from 0 to 2, or -1 for none, got {wrong}"):
                sort_by_expert(experts, 3)
        else:
            assert sort_by_expert(experts, 3).places[1, 1] == -1


def test_bad_arguments_are_named(device):
    experts = random_experts(4, 2, 8, device=device)
    wrong = functools.partial(refuses, sort_by_expert)
    wrong(TypeError, "experts must be a tensor, got list", [[1]], 8)
    wrong(TypeError, "experts must be a dense int64 or int32 tensor, got .*int16", experts.short(), 8)
    wrong(ValueError, r"experts must be \[t, k\] with at least one choice, got \[8\]", experts.flatten(), 8)
    wrong(ValueError, "num_experts must be from 1 to 2147483647, got 0", experts, 0)
    wrong(TypeError, "capacity must be an int, got float", experts, 8, capacity=1.25)
    wrong(ValueError, "capacity must be from 0 to 2147483647, got -1", experts, 8, capacity=-1)
    wrong(ValueError, "capacity must be a multiple of 16, got 8", experts, 8, capacity=8, multiple=16)
    wrong(ValueError, "multiple must be from 1 to 2147483647, got 0", experts, 8, multiple=0)
    wrong(ValueError, "8 slots of 8 experts need more than 2147483647 rows", experts, 8, capacity=2**29)
