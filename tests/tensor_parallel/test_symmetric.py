"""Linears over memory that ranks share, by torch's references of its ops; refusals."""

import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from parallel_ops import all_gather_linear, linear_reduce_scatter
from parallel_ops.tensor_parallel.linear import symmetric
from support.ranks.distributed import Raised, ranks

BF16 = torch.bfloat16


def linears(rank, biased):
    """Outputs and gradients of both linears, symmetric and whole: 16 bits, several weights."""
    results = []
    group = dist.group.WORLD
    for how in ("off", "symmetric"):
        generator = torch.Generator().manual_seed(0)

        def leaf(*shape, generator=generator):
            return torch.randint(-2, 3, shape, generator=generator).to(BF16).requires_grad_()

        weights, biases = [leaf(16, 8), leaf(24, 8)], [leaf(16), leaf(24)] if biased else None
        back, bias = leaf(8, 40), leaf(8) if biased else None
        x = torch.randint(-2, 3, (4, 2, 8), generator=torch.Generator().manual_seed(1 + rank)).to(BF16).requires_grad_()
        with (
            mock.patch.object(symmetric, "_refusals", {group: None}),
            torch.library._scoped_library("symm_mem", "IMPL") as library,
        ):
            # torch's ops for GPUs, by their references: what is passed to them, and what is done with their results.
            library.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
            library.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
            outputs = all_gather_linear(x, weights, biases, group=group, overlap=how)
            assert not any(y._is_view() for y in outputs)
            y = linear_reduce_scatter(torch.cat(outputs, dim=-1).clamp(-4, 4), back, bias, group=group, overlap=how)
            y.float().sum().backward()
        leaves = [x, *weights, *(biases or []), back, *([bias] if biased else [])]
        results.append([y.detach(), *(t.grad for t in leaves)])
    return results


@pytest.mark.parametrize("biased", [False, True])
def test_linears_compute_what_they_do_with_collectives(biased):
    """On integers, so that sums are exact."""
    for plain, symmetric_ones in ranks(2).run(linears, biased):
        assert all(torch.equal(a, b) for a, b in zip(plain, symmetric_ones, strict=True))


def refused(rank, what):
    x = torch.randn(4 + (what == "sizes") * rank, 8 if what != "width" else 6)
    x = x if what == "dtype" else x.to(BF16)
    sizes = [4, 5] if what == "sizes" else None
    all_gather_linear(x, x.new_zeros(4, x.shape[1]), group=dist.group.WORLD, sizes=sizes, overlap="symmetric")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("device", "rank 0: tensors are on cpu, and only GPUs of one node read each other's memory"),
        ("dtype", "it takes float16 and bfloat16, got torch.float32"),
        ("width", "the last dimension must be a multiple of 8, got 6"),
        ("sizes", r"shards must be equal, got sizes=\[4, 5\]"),
    ],
)
def test_what_cannot_be_pulled_is_refused_on_every_rank(what, message):
    for outcome in ranks(2).outcomes(refused, what):
        assert isinstance(outcome, Raised) and outcome.type == "ValueError"
        with pytest.raises(
            AssertionError, match=r"all_gather_linear: overlap=\"symmetric\" cannot do this call: " + message
        ):
            raise AssertionError(outcome.message)


def workspaces_left(rank):
    """Workspaces that live after torch has taken a larger one: of an eager call and of a captured one."""
    group, found = dist.group.WORLD, []
    name, workspaces = group.group_name, symmetric_memory._group_name_to_workspace_tensor
    x, weight = torch.ones(4, 8, dtype=BF16), torch.ones(16, 8, dtype=BF16)
    for captured in (False, True):
        with (
            mock.patch.object(symmetric, "capturing", return_value=captured),
            torch.library._scoped_library("symm_mem", "IMPL") as library,
        ):
            library.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
            workspaces[name] = torch.empty(8)
            alive = weakref.ref(workspaces[name])
            symmetric.gather_and_multiply(group, x, [weight], [None])
            workspaces[name] = torch.empty(16)
            found.append(alive() is not None)
    del workspaces[name]
    return found


def test_a_graph_keeps_the_workspace_that_it_reads():
    assert ranks(2).run(workspaces_left) == [[False, True]] * 2


def without_peer_access(rank):
    """Two GPUs of one node, of which each sees the other."""
    properties = [SimpleNamespace(uuid=uuid) for uuid in ("first", "second")]
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=2),
        mock.patch.object(torch.cuda, "get_device_properties", properties.__getitem__),
        mock.patch.object(torch.cuda, "can_device_access_peer", return_value=False),
    ):
        gpus = symmetric._gpus(torch.device("cuda", rank))
    with (
        mock.patch.object(symmetric, "_refusals", {}),
        mock.patch.object(symmetric, "_problem", return_value=None),
        mock.patch.object(symmetric, "_gpus", return_value=gpus),
    ):
        refused(rank, "access")


def test_gpus_without_peer_access_are_refused():
    for outcome in ranks(2).outcomes(without_peer_access):
        assert isinstance(outcome, Raised) and outcome.type == "ValueError"
        assert "the GPU of rank 0 has no peer access to that of rank 1" in outcome.message


def test_what_is_called_of_torch_is_there():
    """Its names and the order of its arguments; what they do needs GPUs."""
    schema = torch.ops.symm_mem.fused_all_gather_matmul.default._schema
    assert [a.name for a in schema.arguments] == ["A", "Bs", "gather_dim", "group_name", "return_A"]
    schema = torch.ops.symm_mem.fused_matmul_reduce_scatter.default._schema
    assert [a.name for a in schema.arguments] == ["A", "B", "reduce_op", "scatter_dim", "group_name"]
