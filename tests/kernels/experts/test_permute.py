import pytest
import torch

from parallel_ops import permute, unpermute
from parallel_ops.ops import permute_reference, sort_by_expert_reference, unpermute_reference
from ptx import aot
from ptx.kernels import check_compiled, meta
from support.numerics import suite
from support.numerics.experts import random_experts
from support.numerics.suite import randn


def launches(dtype, h, k):
    from parallel_ops.triton_kernels.experts import permute as kernels

    x, y = meta(512, h, dtype=dtype), meta(512 * k, h, dtype=dtype)
    rows, places = meta(512 * k, dtype=torch.int32), meta(512, k, dtype=torch.int32)
    weights = meta(512, k, dtype=torch.float32)
    with aot.recorded() as recorded:
        kernels.scatter(x, None, rows, places, None, y, None)
        kernels.scatter(x, None, rows, places, weights, y, None)
        kernels.scatter(x, y, rows, places, weights, y, weights)
        kernels.scatter(x, y, rows, places, weights, None, weights)
        kernels.gather(y, places, weights, x)
        kernels.gather(y, places, None, x)
    return recorded


@pytest.mark.aot
@pytest.mark.parametrize(
    ("dtype", "h", "k", "capability"),
    [(torch.bfloat16, 7168, 8, 80), (torch.bfloat16, 7168, 8, 90), (torch.bfloat16, 7168, 8, 100),
     (torch.float32, 4096, 6, 90), (torch.bfloat16, 1001, 3, 90), (torch.bfloat16, 512, 20, 90)],
    ids=str,
)  # fmt: skip
def test_compiled_code(dtype, h, k, capability):
    # All slots of these tensors without memory lie at row 0: a token's row is read once for each choice, from L1, and
    # row 0 is touched as often.
    check_compiled(launches(dtype, h, k), h, capability, passes=k)


def order_of(t, k, capacity, multiple):
    return sort_by_expert_reference(random_experts(t, k, 8, absent=True), 8, capacity=capacity, multiple=multiple)


@pytest.mark.executed
@pytest.mark.parametrize(
    ("h", "k", "dtype", "capacity", "multiple"),
    [(1030, 3, torch.bfloat16, None, 8), (40, 2, torch.float16, 5, 1), (40, 17, torch.float32, None, 1),
     (7, 3, torch.float64, 0, 1), (2100, 2, torch.float32, None, 4), (5000, 1, torch.bfloat16, None, 1),
     (1, 2, torch.bfloat16, None, 1)],
    ids=str,
)  # fmt: skip
def test_interpreted(h, k, dtype, capacity, multiple):
    order = order_of(20, k, capacity, multiple)
    x, y = (randn(n, h, dtype=dtype) for n in (20, order.rows.shape[0]))
    weights = randn(20, k, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    slack = 64 if dtype is torch.float64 else 8

    def of_order(f):
        return lambda *args: f(args[0], order, *args[1:])

    pairs = [(of_order(f), of_order(g)) for f, g in ((permute, permute_reference), (unpermute, unpermute_reference))]
    suite.check_numerics(*pairs[0], [x], y.detach(), slack_ulps=slack)
    for w in (None, weights):
        suite.check_numerics(*pairs[1], [y, w], x.detach(), slack_ulps=slack)
    suite.check_numerics(*pairs[1], [y.detach(), weights], x.detach(), slack_ulps=slack)


@pytest.mark.executed
def test_padding_and_dropped_slots():
    """Rows that no token has are zero; a dropped slot adds nothing, whatever its weight is."""
    order = order_of(20, 2, 3, 1)
    x, weights = randn(20, 40, dtype=torch.float32).detach(), randn(20, 2, dtype=torch.float32).detach()
    weights = weights.masked_fill(order.places < 0, torch.nan)
    y = permute(x, order)
    z = unpermute(y, order, weights)
    assert torch.equal(y, permute_reference(x, order))
    torch.testing.assert_close(z, unpermute_reference(y, order, weights.nan_to_num()))


@pytest.mark.executed(smoke=False)
def test_layouts():
    order = order_of(9, 3, None, 4)
    x, y = (randn(n, 72, dtype=torch.float32) for n in (9, order.rows.shape[0]))
    weights = randn(9, 3, dtype=torch.float32)
    suite.check_layouts(lambda x: permute(x, order), [x])
    for index in (0, 1):
        suite.check_layouts(lambda y, w: unpermute(y, order, w), [y, weights], index=index)
