import pytest
import torch

from parallel_ops import sort_by_expert
from parallel_ops.ops import sort_by_expert_reference
from ptx import aot
from ptx.kernels import check_machine_code, meta
from support.numerics.experts import random_experts


def launches(t, k, n, capacity):
    from parallel_ops.triton_kernels.experts import order as kernels

    experts, places, offs = meta(t, k, dtype=torch.int64), meta(t, k, dtype=torch.int32), meta(n, dtype=torch.int32)
    rows = meta(t * k if capacity is None else n * capacity, dtype=torch.int32)
    with aot.recorded() as recorded:
        kernels.sort(experts, rows, places, offs, capacity=capacity, multiple=1)
    return recorded


@pytest.mark.aot
@pytest.mark.parametrize(
    ("t", "k", "n", "capacity", "capability"),
    [(8192, 8, 256, None, 80), (8192, 8, 256, None, 90), (8192, 8, 256, 300, 100), (32768, 6, 64, None, 90),
     (8192, 8, 1024, None, 90), (8192, 1, 4096, None, 90)],
    ids=str,
)  # fmt: skip
def test_compiled_code(t, k, n, capacity, capability):
    recorded = launches(t, k, n, capacity)
    assert len(recorded) == 3
    for launch in recorded:
        check_machine_code(launch, capability)


@pytest.mark.executed
@pytest.mark.parametrize(
    ("t", "k", "n", "capacity", "multiple"),
    [(700, 2, 300, None, 4), (40, 3, 16, None, 1), (700, 3, 16, 5, 1), (40, 3, 16, 0, 1), (40, 3, 1, None, 128),
     (1, 1, 1, None, 1), (0, 2, 5, None, 4), (0, 2, 5, 3, 1), (5000, 1, 8, None, 16)],
    ids=str,
)  # fmt: skip
def test_interpreted(t, k, n, capacity, multiple):
    """Ids out of range are dropped, as -1 is; int32 and int64, contiguous and not."""
    for dtype, strided in ((torch.int64, False), (torch.int32, True)):
        experts = random_experts(t, k, n, absent=True).to(dtype)
        wrong = torch.where(experts == -1, n + 3, experts)
        given = torch.stack([wrong, wrong], dim=-1)[..., 0] if strided else wrong
        order = sort_by_expert(given, n, capacity=capacity, multiple=multiple)
        reference = sort_by_expert_reference(experts, n, capacity=capacity, multiple=multiple)
        assert all(torch.equal(a, b) for a, b in zip(order, reference, strict=True))
