"""How the linears over a group add partial sums, and by which calls of the group."""

from unittest import mock

import pytest
import torch

from parallel_ops import all_gather_linear, column_parallel_linear, linear_reduce_scatter
from parallel_ops.comm.transport import base
from parallel_ops.tensor_parallel.linear import all_gather_linear as of_gather
from parallel_ops.tensor_parallel.linear import column_parallel_linear as of_copy
from parallel_ops.tensor_parallel.linear.call import GroupCall, encode
from support.numerics import linear_reductions
from support.ranks.distributed import Raised, ranks

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("grad_reduce", "calls"), [("backend", PLAIN), ("fp32", EXACT)])
def test_without_chunks_each_transfer_is_one_collective(kind, grad_reduce, calls):
    for got in ranks(2).run(linear_reductions.calls_of, kind, "off", grad_reduce):
        assert got == calls[kind]


@pytest.mark.parametrize(("kind", "sequence_parallel"), [("gather", True), ("copy", False)])
def test_the_plain_linears_of_megatron_make_these_calls(kind, sequence_parallel):
    pytest.importorskip("megatron.core", exc_type=ImportError)
    from support.integrations import megatron

    for got in ranks(2).run(megatron.plain_linear_calls, sequence_parallel):
        assert got == PLAIN[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_messages_and_their_sum_is_exact(kind):
    for forward, backward in ranks(2).run(linear_reductions.calls_of, kind, 2, "backend"):
        # The gather's backward is never cut.
        expected = {"gather": {"send", "recv", "all_gather", "reduce_scatter"}, "scatter": {"send", "recv"}}
        assert {*forward, *backward} == expected.get(kind, {"send", "recv", "all_gather"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_the_backends_sum_of_integers_is_the_linear_of_one_process(size, kind, dtype):
    for overlap in ("off", "auto", 2):
        for results in ranks(size).run(linear_reductions.by_the_backend, kind, overlap, dtype):
            for got, expected in results:
                assert torch.equal(got, expected), overlap


@pytest.mark.parametrize("op", [all_gather_linear, linear_reduce_scatter, column_parallel_linear])
def test_bad_reductions_are_named(op):
    x, weight = torch.randn(4, 8), torch.randn(3, 8)
    with pytest.raises(ValueError, match=rf"{op.__name__}: grad_reduce must be 'fp32' or 'backend', got 'exact'"):
        op(x, weight, group=None, grad_reduce="exact")


def test_ranks_with_different_reductions_raise():
    for outcome in ranks(2).outcomes(linear_reductions.apart):
        assert isinstance(outcome, Raised) and "grad_reduce='backend'" in outcome.message


class Logged:
    """A handle that says when it is waited for."""

    def __init__(self, handle, log, name):
        self._handle, self._log, self._name = handle, log, name

    def wait(self):
        self._log.append(f"wait for {self._name}")
        self._handle.wait()


class Done:
    def wait(self):
        pass


class Alone:
    """One rank's end of a group whose other rank has zeros: everything arrives at once."""

    rank, size = 0, 2

    def __init__(self):
        self.log = []
        self.capabilities = base.Capabilities("alone", ("cpu",), False)

    def _started(self, name):
        self.log.append(f"start {name}")
        return Logged(Done(), self.log, name)

    def all_reduce(self, op, tensor):
        return self._started("all-reduce")

    def all_gather(self, op, received, sent):
        received.zero_()[: sent.shape[0]].copy_(sent)
        return self._started("all-gather")

    def all_to_all(self, op, received, sent):
        received.zero_().view(2, -1)[0].copy_(sent.view(2, -1)[0])
        return self._started("all-to-all")

    def reduce_scatter(self, op, received, sent):
        received.view(-1).copy_(sent.view(2, -1)[0])
        return self._started("reduce-scatter")


def gradients(module, exact, features=(6,), frozen=()):
    """What happens in a backward with weights of so many output features, in order."""
    transport = Alone()
    x, weights = torch.randn(2 if module is of_gather else 4, 8), [torch.randn(n, 8) for n in features]
    dys = [torch.randn(4, n) for n in features]
    needs = [True, *(i not in frozen for i in range(len(features)))]
    call = GroupCall("test", "group", [2, 2], encode("test", "off"), needs, exact)

    def factors(dys, inputs, part=slice(None)):
        names = [f"dW{i}" if len(features) > 1 else "dW" for i in range(len(features))]
        transport.log += names[part]

    with (
        mock.patch.object(GroupCall, "transport", return_value=transport),
        mock.patch.object(GroupCall, "check_backward"),
    ):
        dx, _ = module._op.input_gradient(call, dys, x, weights, factors)
    torch.testing.assert_close(dx[:2], sum(dy @ w for dy, w in zip(dys, weights, strict=True))[:2])
    return transport.log


@pytest.mark.parametrize(
    ("module", "exact", "expected"),
    [
        (of_copy, False, ["start all-reduce", "dW", "wait for all-reduce"]),
        (of_copy, True, ["start all-to-all", "dW", "wait for all-to-all", "start all-gather", "wait for all-gather"]),
        (of_gather, False,
         ["start all-gather", "start reduce-scatter", "wait for all-gather", "dW", "wait for reduce-scatter"]),
        (of_gather, True,
         ["start all-gather", "start all-to-all", "wait for all-gather", "dW", "wait for all-to-all"]),
    ],
)  # fmt: skip
def test_collectives_of_a_backward_run_beside_its_products(module, exact, expected):
    assert gradients(module, exact) == expected


@pytest.mark.parametrize(
    ("features", "frozen", "beside_exchange", "beside_gather"),
    [
        ((6, 6), (), ["dW0"], ["dW1"]),
        ((8, 2, 2), (), ["dW0"], ["dW1", "dW2"]),
        ((4, 4, 4), (), ["dW0", "dW1"], ["dW2"]),
        ((2, 2, 8), (), ["dW0", "dW1"], ["dW2"]),
        ((6, 6), (0,), ["dW0", "dW1"], []),  # a frozen one has no matmul
        ((6, 6), (0, 1), [], []),
    ],
)
def test_both_transfers_of_an_exact_sum_run_beside_products(features, frozen, beside_exchange, beside_gather):
    exchange = ["start all-to-all", *beside_exchange, "wait for all-to-all"]
    expected = [*exchange, "start all-gather", *beside_gather, "wait for all-gather"]
    assert gradients(of_copy, True, features, frozen) == expected


@pytest.mark.parametrize("grad_reduce", ["fp32", "backend"])
@pytest.mark.parametrize("size", [2, 4])
def test_gradients_beside_transfers_have_the_same_bits_wherever_they_go(size, grad_reduce):
    for results in ranks(size).run(linear_reductions.of_three_weights, grad_reduce):
        for found in results[1:]:
            assert len(found) == 7
            assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))
