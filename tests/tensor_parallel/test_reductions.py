"""How the linears over a group add partial sums, and by which calls of the group."""

import pytest
import torch

from parallel_ops import all_gather_linear, column_parallel_linear, linear_reduce_scatter
from support import linear_reductions
from support.distributed import Raised, ranks

KINDS = ["gather", "scatter", "copy"]

# What Megatron-LM's plain linears call: forward, backward.
PLAIN = {
    "gather": (["all_gather"], ["all_gather", "reduce_scatter"]),
    "scatter": (["reduce_scatter"], ["all_gather"]),
    "copy": ([], ["all_reduce"]),
}
# One exchange in the place of each sum; an all-reduce is an exchange and a gather of the sums.
EXACT = {
    "gather": (["all_gather"], ["all_gather", "all_to_all"]),
    "scatter": (["all_to_all"], ["all_gather"]),
    "copy": ([], ["all_to_all", "all_gather"]),
}


@pytest.mark.parametrize("overlap", ["off", "bulk"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("reduction", "calls"), [("backend", PLAIN), ("exact", EXACT)])
def test_without_pieces_each_transfer_is_one_collective(kind, overlap, reduction, calls):
    for got in ranks(2).run(linear_reductions.calls_of, kind, overlap, reduction):
        assert got == calls[kind]


@pytest.mark.parametrize(("kind", "sequence_parallel"), [("gather", True), ("copy", False)])
def test_the_plain_linears_of_megatron_make_these_calls(kind, sequence_parallel):
    pytest.importorskip("megatron.core", exc_type=ImportError)
    from support import megatron

    for got in ranks(2).run(megatron.plain_linear_calls, sequence_parallel):
        assert got == PLAIN[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_messages_and_their_sum_is_exact(kind):
    for forward, backward in ranks(2).run(linear_reductions.calls_of, kind, 2, "backend"):
        # The gather's backward is never cut.
        expected = {"gather": {"send", "recv", "all_gather", "reduce_scatter"}, "scatter": {"send", "recv"}}
        assert {*forward, *backward} == expected.get(kind, {"send", "recv", "all_gather"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_the_backends_sum_of_integers_is_the_linear_of_one_process(size, kind, dtype):
    for overlap in ("off", "bulk", "auto", 2):
        for results in ranks(size).run(linear_reductions.by_the_backend, kind, overlap, dtype):
            for got, expected in results:
                assert torch.equal(got, expected), overlap


@pytest.mark.parametrize("op", [all_gather_linear, linear_reduce_scatter, column_parallel_linear])
def test_bad_reductions_are_named(op):
    x, weight = torch.randn(4, 8), torch.randn(3, 8)
    with pytest.raises(ValueError, match=rf"{op.__name__}: reduction must be 'exact' or 'backend', got 'fp32'"):
        op(x, weight, group=None, reduction="fp32")


def test_ranks_with_different_reductions_raise():
    for outcome in ranks(2).outcomes(linear_reductions.apart):
        assert isinstance(outcome, Raised) and "reduction='backend'" in outcome.message
