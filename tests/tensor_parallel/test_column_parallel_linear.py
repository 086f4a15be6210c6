"""column_parallel_linear over gloo groups of 2 and 3 ranks, and on one."""

import pytest
import torch

from parallel_ops import column_parallel_linear
from parallel_ops.tensor_parallel import column_parallel_linear_reference
from support import parallel_linear as on_rank
from support import suite
from support.distributed import Raised, ranks
from support.parallel_linear import integers

groups = pytest.mark.parametrize("size", [2, 3])
OVERLAPS = ["off", "bulk", "auto", 1, 3]


@groups
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 2), (1,)], ids=str)
def test_integers_give_the_unsharded_linear_exactly(size, dtype, shape):
    """Rows that do not divide by the ranks, and fewer of them."""
    x, weight = integers(*shape, 5, seed=1, dtype=dtype), integers(3 * size, 5, seed=2, dtype=dtype)
    bias, grad = integers(3 * size, seed=3, dtype=dtype), integers(*shape, 3 * size, seed=4, dtype=dtype)
    expected = on_rank.whole_linear(x, weight, bias, grad)
    for overlap in [*OVERLAPS, None]:
        results = ranks(size).run(on_rank.copied_linear, [x, weight, bias, grad], overlap)
        y, dx, dweight, dbias = zip(*results, strict=True)
        of_ranks = [torch.cat(y, -1), dx[0], torch.cat(dweight), torch.cat(dbias)]
        for got, want in zip(of_ranks, expected, strict=True):
            assert torch.equal(got, want), overlap
        assert all(torch.equal(d, dx[0]) for d in dx), overlap


@pytest.mark.parametrize("overlap", ["off", 2])
def test_several_weights_main_grads_and_deferred_gradients(overlap):
    for plain, handled in ranks(2).run(on_rank.copied_to_several, overlap):
        for got, want in zip(handled, plain, strict=True):
            assert torch.equal(got, want)


def test_sends_once_and_only_where_the_gradient_of_x_is_wanted():
    """The parts that others own, their sums back, and in the forward the comparison of the calls."""
    assert ranks(2).run(on_rank.copies_sent) == [{"x": 3, "weight": 0}] * 2


def test_ranks_that_disagree_all_raise():
    outcomes = ranks(2).outcomes(on_rank.copied_apart)
    assert all(
        isinstance(o, Raised) and "column_parallel_linear: the ranks of the group make diff" in o.message
        for o in outcomes
    )


def test_compiles_to_the_same_gradients():
    for eager, compiled in ranks(2).run(on_rank.copied_and_compiled):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("device", suite.DEVICES)
def test_one_rank_is_a_linear(device):
    args = [
        suite.randn(*s, dtype=torch.float32, device=device, seed=i) for i, s in enumerate([(5, 2, 8), (3, 8), (3,)])
    ]
    ours, reference = (
        lambda *a, f=f: f(*a, group=None) for f in (column_parallel_linear, column_parallel_linear_reference)
    )
    suite.check_numerics(ours, reference, args)
    suite.check_checkpointing(ours, args)
    suite.check_second_derivative_raises(ours, args)
    op = torch.ops.parallel_ops.column_parallel_linear.default
    suite.check_op(op, [args[0], [args[1]], [args[2]], None, [5], 0, [True, True, True], True])
