"""What the collectives refuse, on every rank and before data moves, and what they promise of sums and graphs."""

import types

import pytest
import torch

from parallel_ops import comm
from parallel_ops._internal.distributed import groups as _group
from parallel_ops.comm import consistency
from support.ranks.distributed import Raised, ranks
from support.transports import collectives


def messages(size, op, shapes, options=None):
    outcomes = ranks(size).outcomes(collectives.disagree, op, shapes, options or [{}] * size)
    assert all(isinstance(o, Raised) and o.type in ("ValueError", "TypeError") for o in outcomes), outcomes
    return [o.message for o in outcomes]


def test_shapes_that_disagree_are_named_on_every_rank():
    said = messages(3, "all_gather", [(2, 4), (2, 4), (2, 5)])
    assert said == [said[0]] * 3
    assert "all_gather: the ranks of the group make different calls: ranks 0, 1: x of [2, 4]" in said[0]
    assert "; rank 2: x of [2, 5] torch.float32, dim=0, sizes=[2, 2, 2]" in said[0]


@pytest.mark.parametrize(
    ("op", "shapes", "options"),
    [
        ("reduce_from_group", [(4,), (5,)], None),
        ("reduce_from_group", [(4,), (2, 2)], None),
        ("reduce_scatter", [(4, 2), (4, 2)], [{}, {"dim": 1}]),
        ("reduce_scatter", [(4, 2), (4, 2)], [{"sizes": (1, 3)}, {"sizes": (3, 1)}]),
        ("gather_from_group", [(1,), (3,)], None),
        ("all_gather", [(1,), (3,)], [{"sizes": (1, 3)}, {"sizes": (2, 3)}]),
        ("all_to_all", [(4, 2), (4, 4)], [{"split_dim": 1}] * 2),
        ("reduce_from_group", [(4,), (4,)], [{}, {"grad_reduce": "backend"}]),
    ],
)
def test_other_disagreements(op, shapes, options):
    said = messages(2, op, shapes, options)
    assert "make different calls" in said[0]
    assert said[0] == said[1]


def test_a_group_may_compare_the_first_call_of_a_kind_alone():
    for first, again, other in ranks(2).run(collectives.compared_once):
        assert (first, again) == (1, 0)
        assert "make different calls" in other
    with pytest.raises(
        TypeError, match=r"set_consistency_checks: group must be a torch.distributed.ProcessGroup, got str"
    ):
        comm.set_consistency_checks("world", "first")


def test_counts_that_do_not_meet():
    options = [{"split_sizes": (1, 3), "concat_sizes": (1, 2)}, {"split_sizes": (1, 3), "concat_sizes": (2, 3)}]
    said = messages(2, "all_to_all", [(4,), (4,)], options)
    assert said == ["all_to_all: rank 0 sends 3 entries of dimension 0 to rank 1, which expects 2"] * 2


@pytest.mark.parametrize(
    ("bad", "options", "message"),
    [
        ("no tensor", {}, "all_gather: x must be a tensor, got str"),
        (
            torch.ones(2, 2, device="meta"),
            {},
            "all_gather: x is on meta, but the group's backend sends from cpu; move x",
        ),
        ((2, 2), {"dim": 2}, "all_gather: dim=2 is out of range for x of shape [2, 2]"),
        ((2, 2), {"dim": 0.0}, "all_gather: dim must be an int, got float"),
        ((2, 2), {"sizes": (2, 2, 2)}, "all_gather: sizes must have one entry for each of the 2 ranks, got 3"),
        ((2, 2), {"sizes": (2, 3)}, "all_gather: sizes[1] is 3, but x on this rank has 2 entries in dimension 0"),
        ((2, 2), {"sizes": (-1, 2)}, "all_gather: sizes must not be negative, got [-1, 2]"),
        ((2, 2), {"sizes": 4}, "all_gather: sizes must be a sequence of ints, got int"),
    ],
)
def test_one_wrong_rank_ends_the_call_of_all(bad, options, message):
    said = messages(2, "all_gather", [(2, 2), bad], [{}, options])
    assert said[1] == message
    assert said[0] == f"all_gather: rank 1 of the group rejected its arguments: {message}"


def test_arguments_checked_without_a_group():
    with pytest.raises(TypeError, match=r"reduce_scatter: x must be float64, .* to be summed, got torch.bool"):
        comm.reduce_scatter(torch.ones(2, dtype=torch.bool), None)
    with pytest.raises(TypeError, match=r"all_gather: group must be None or a torch.distributed.ProcessGroup"):
        comm.all_gather(torch.ones(2), "world")
    with pytest.raises(ValueError, match="scatter_to_group: sizes adds up to 3, but x has 2 entries in dimension 0"):
        comm.scatter_to_group(torch.ones(2), None, sizes=(3,))


def test_uneven_splits_must_be_asked_for():
    said = messages(2, "reduce_scatter", [(3,), (3,)])
    assert said[0] == (
        "reduce_scatter: x has 3 entries in dimension 0, which 2 ranks cannot split evenly; "
        "pass sizes, for example shard_sizes(3, 2)"
    )


def test_ranks_that_go_backward_differently():
    outcomes = ranks(2).outcomes(collectives.wrong_gradient)
    assert all("backward of all_gather" in o.message or "backward of copy_to_group" in o.message for o in outcomes)
    assert all("make different calls" in o.message for o in outcomes)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", [(7, 3), (300, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_in_rank_order_with_one_rounding(size, shape, dtype):
    results = ranks(size).run(collectives.both_reductions, shape, dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    total = results[0]["x"].to(wide)
    for result in results[1:]:
        total = total + result["x"].to(wide)
    expected = total.to(dtype)
    for result, shard in zip(results, expected.split(list(comm.shard_sizes(shape[0], size))), strict=True):
        assert torch.equal(result["all"], expected)
        assert torch.equal(result["again"], expected)
        assert torch.equal(result["scattered"], shard)


def test_second_derivatives():
    assert ranks(3).run(collectives.double_backward) == [True] * 3


@pytest.mark.parametrize("uneven", [False, True])
def test_compiled_without_graph_breaks(uneven):
    for eager, compiled in ranks(2).run(collectives.compiled, uneven):
        for a, b in zip(eager, compiled, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("total", "parts", "sizes"), [(7, 3, (3, 2, 2)), (2, 4, (1, 1, 0, 0)), (0, 2, (0, 0))])
def test_shard_sizes(total, parts, sizes):
    assert comm.shard_sizes(total, parts) == sizes


def test_shard_sizes_refuses():
    with pytest.raises(ValueError, match="parts must be at least 1, got 0"):
        comm.shard_sizes(3, 0)
    with pytest.raises(ValueError, match="total must not be negative, got -1"):
        comm.shard_sizes(-1, 2)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "cpu:gloo,cuda:nccl"])
def test_an_error_of_one_rank_is_announced_where_its_tensors_are(backend):
    others, own = ranks(2).run(collectives.wrong_on_one_rank, backend)
    ops = ["all_gather", "vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"]
    for op, other in zip(ops, others, strict=True):
        assert other.startswith(f"{op}: rank 1 of the group rejected its arguments")
    for op, message in zip(ops, own, strict=True):
        assert message.startswith(f"{op}: ") and "rejected its arguments" not in message


CPU, META = torch.zeros(1), torch.zeros(1, device="meta")
ON_CUDA = types.SimpleNamespace(device=torch.device("cuda", 3))


@pytest.mark.parametrize(
    ("config", "arguments", "device"),
    [
        ("cpu:gloo", [CPU], "cpu"),
        ("cpu:gloo,cuda:gloo", [META], "cpu"),
        ("cpu:gloo,cuda:gloo", [ON_CUDA], "cpu"),
        ("cuda:nccl", [CPU], "cuda"),
        ("cuda:nccl", [ON_CUDA], "cuda:3"),
        ("cuda:nccl2", [CPU], "cuda"),
        ("cpu:gloo,cuda:nccl-lazy", [ON_CUDA], "cuda:3"),
        ("cpu:gloo,cuda:nccl", [CPU], "cpu"),
        ("cpu:gloo,cuda:nccl", [META, CPU], "cpu"),
        ("cpu:gloo,cuda:nccl", [None, ON_CUDA], "cuda:3"),
        ("cpu:gloo,cuda:nccl", [None, META, "x"], None),
        ("xpu:xccl", [CPU], None),
    ],
)
def test_where_the_others_have_their_tensors(monkeypatch, config, arguments, device):
    monkeypatch.setattr(_group, "Tensor", (torch.Tensor, types.SimpleNamespace))
    expected = None if device is None else torch.device(device)
    assert _group.device_of_call(_group.device_types_of(config), arguments) == expected


class Group:
    """Stands for a process group, which the table of what was asked refers to weakly."""


def test_on_cuda_a_call_asks_once(monkeypatch):
    """Whether a rank asks depends on nothing that may differ between ranks, and a refused call is asked again."""
    asked, captured = [], []

    def ask(group, call, device):
        asked.append(call)
        if call.op == "refused":
            raise ValueError(call.op)
        return [[1], [2]]

    monkeypatch.setattr(consistency, "_compare", ask)
    monkeypatch.setattr(consistency, "refuse_capture", lambda op, device_type, what: captured.append(op))
    monkeypatch.setattr(consistency, "_MOST_CHECKED", 3)
    cuda, group = torch.device("cuda"), Group()
    call = consistency.CallSignature("op", (torch.float32, 3), "x of [3]", (5, 6))
    assert consistency.check_consistency(group, call, cuda) == [[1], [2]]
    assert consistency.check_consistency(group, call, cuda) is None
    assert consistency.check_consistency(group, call._replace(text="again", own=(7, 8)), cuda) is None
    assert consistency.check_consistency(Group(), call, cuda) is not None
    assert len(asked) == 2
    refused = call._replace(op="refused")
    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            consistency.check_consistency(group, refused, cuda)
    for n in range(3):  # the last of them is one too many: all are forgotten
        assert consistency.check_consistency(group, call._replace(same=(n,)), cuda) is not None
    assert consistency.check_consistency(group, call, cuda) is not None
    # What asks cannot be captured in a CUDA graph.
    assert captured == [c.op for c in asked]
    assert consistency.check_consistency(group, call, torch.device("cpu")) is not None
