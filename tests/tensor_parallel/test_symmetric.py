"""Gathers over memory that ranks share: the order of copies, flags and barriers; the linears over them; refusals."""

import inspect
import random
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from parallel_ops import all_gather_linear, linear_reduce_scatter
from parallel_ops.comm import symmetric_memory as pulls
from parallel_ops.tensor_parallel.linear import choose as calls
from parallel_ops.tensor_parallel.linear import symmetric
from support.ranks.distributed import Raised, ranks

BF16 = torch.bfloat16


class Node:
    """Ranks whose lanes hold what was enqueued; any lane whose first entry can run may be the next to run it."""

    def __init__(self, size):
        self.lanes = [{"current": [], "side": []} for _ in range(size)]
        self.workspaces = [torch.zeros(0) for _ in range(size)]
        self.reached = {}

    def run(self, seed):
        order = random.Random(seed)
        while waiting := [lane for of_rank in self.lanes for lane in of_rank.values() if lane]:
            ready = [lane for lane in waiting if lane[0][0]()]
            assert ready, "a deadlock"
            order.choice(ready).pop(0)[1]()


class Rank:
    """One rank of a ``Node`` in the place of ``Peers``."""

    def __init__(self, node, rank):
        self.node, self.rank, self.size = node, rank, len(node.lanes)
        self.given = {"current": 0, "side": 0}

    def put(self, lane, action, ready=lambda: True):
        self.node.lanes[self.rank][lane].append((ready, action))
        self.given[lane] += 1

    def reserve(self, nbytes):
        if self.node.workspaces[self.rank].numel() < nbytes:
            self.node.workspaces[self.rank] = torch.zeros(nbytes, dtype=torch.uint8)

    def workspace(self, rank, like):
        return lambda: self.node.workspaces[rank][: like.nbytes].view(like.dtype).view(like.shape)

    def flags(self):
        return torch.zeros(self.size, dtype=torch.int32)

    def copy(self, lane, target, source):
        def copy():
            (target() if callable(target) else target).copy_(source() if callable(source) else source)

        self.put(lane, copy)

    def set_flag(self, lane, flags, index):
        self.put(lane, lambda: flags.__setitem__(index, pulls.READY))

    def barrier(self, lane):
        place = lane, sum(1 for name, _ in self.node.reached if name == (self.rank, lane))
        key = (self.rank, lane), place[1]
        self.node.reached[key] = False
        self.put(lane, lambda: self.node.reached.__setitem__(key, True))
        peers = [((r, lane), place[1]) for r in range(self.size)]
        self.put(lane, lambda: None, lambda: all(self.node.reached.get(peer, False) for peer in peers))

    def follow(self, lane, other):
        left = self.node.lanes[self.rank][other]
        before = self.given[other]
        self.put(lane, lambda: None, lambda: self.given[other] - len(left) >= before)


def steps(size, seed, calls=3, lax=False):
    """Rows that each rank has seen, tile by tile as flags allowed, in calls whose workspaces are the same."""
    node, seen = Node(size), []
    shards = [[torch.full((2, 8), 100.0 * call + rank) for rank in range(size)] for call in range(calls)]
    for rank in range(size):
        device = Rank(node, rank)
        for call in range(calls):
            if lax:  # a rank that does not wait until all have pulled
                barrier = device.barrier
                device.barrier = lambda lane, barrier=barrier: None if lane == "side" else barrier(lane)
            found = pulls.start_pulls(device, shards[call][rank])
            for step in range(size):
                source = (rank + step) % size
                copy = torch.zeros(2, 8)
                seen.append((copy, shards[call][source]))
                device.put(
                    "current",
                    lambda copy=copy, found=found, source=source: copy.copy_(found.whole[2 * source : 2 * source + 2]),
                    lambda found=found, source=source: bool(found.flags[source] == pulls.READY),
                )
            found.wait()
    node.run(seed)
    return seen


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_rows_are_there_with_their_flags_in_any_interleaving(size, trials):
    for seed in range(trials or (10 if size < 8 else 3)):
        assert all(torch.equal(got, want) for got, want in steps(size, seed))


def test_a_workspace_that_is_written_before_all_have_pulled_is_found():
    assert not all(torch.equal(got, want) for seed in range(10) for got, want in steps(3, seed, lax=True))


class Here(pulls.Peers):
    """``Peers`` of a gloo rank: all that is enqueued runs at once, and peers are read at the first barrier."""

    def __init__(self, group):
        self.group, self.rank, self.size, self.calls = group, group.rank(), group.size(), []

    def reserve(self, nbytes):
        self.all = torch.zeros(self.size, nbytes, dtype=torch.uint8)

    def workspace(self, rank, like):
        return self.all[rank].view(like.dtype).view(like.shape)

    def flags(self):
        return torch.zeros(self.size, dtype=torch.int32)

    def copy(self, lane, target, source):
        self.calls.append(lane)
        target.copy_(source)

    def set_flag(self, lane, flags, index):
        flags[index] = pulls.READY

    def barrier(self, lane):
        if lane == "current":
            dist.all_gather_into_tensor(self.all.view(-1), self.all[self.rank].clone(), group=self.group)

    def follow(self, lane, other):
        pass


def product(rows, weight, bias, out, flags, ready, own, shards):
    assert (flags == ready).all() and own == dist.get_rank()
    out.copy_(rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t()))


def linears(rank, biased, fastest):
    """Outputs and gradients of both linears, symmetric and whole: 16 bits, several weights."""
    results = []
    group = dist.group.WORLD
    peers = Here(group)
    for how in ("off", "symmetric"):
        generator = torch.Generator().manual_seed(0)

        def leaf(*shape, generator=generator):
            return torch.randint(-2, 3, shape, generator=generator).to(BF16).requires_grad_()

        weights, biases = [leaf(16, 8), leaf(24, 8)], [leaf(16), leaf(24)] if biased else None
        back, bias = leaf(8, 40), leaf(8) if biased else None
        x = torch.randint(-2, 3, (4, 2, 8), generator=torch.Generator().manual_seed(1 + rank)).to(BF16).requires_grad_()
        with (
            mock.patch.object(pulls, "_peers", {group: peers}),
            mock.patch("parallel_ops.triton_kernels.gated_matmul.gated_matmul", product),
            mock.patch.multiple(symmetric, may_measure=lambda device: fastest is not None),
            mock.patch.object(calls, "_fastest", lambda run, way, device: run(way) is None or float(way != fastest)),
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
    calls.measured(group).clear()
    return results, len(peers.calls)


@pytest.mark.parametrize(
    ("biased", "fastest"), [(False, None), (False, symmetric.FUSED), (False, symmetric.GATED), (True, None)]
)
def test_linears_compute_what_they_do_with_collectives(biased, fastest):
    """On integers, so that sums are exact; ours takes calls with a bias, and where it was measured to be the faster."""
    for (plain, symmetric_ones), pulled in ranks(2).run(linears, biased, fastest):
        assert all(torch.equal(a, b) for a, b in zip(plain, symmetric_ones, strict=True))
        gathers = {None: 1 if biased else 0, symmetric.FUSED: 2, symmetric.GATED: 4}[fastest]
        assert pulled == 3 * gathers


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


def test_what_is_called_of_torch_is_there():
    """Its names and the order of its arguments; what they do needs GPUs."""
    memory = symmetric_memory._SymmetricMemory
    for name, arguments in {
        "get_buffer": "rank: [^,]*, sizes: [^,]*(, [^,]*)?, dtype: ",
        "barrier": "channel: .* = 0, timeout_ms: .* = 0",
        "stream_write_value32": "input: [^,]*, offset: [^,]*, val: ",
        "memset32": "input: [^,]*, offset: [^,]*, val: [^,]*, count: ",
    }.items():
        assert re.search(arguments, getattr(memory, name).__doc__), getattr(memory, name).__doc__
    assert list(inspect.signature(symmetric_memory.get_symm_mem_workspace).parameters) == ["group_name", "min_size"]
    schema = torch.ops.symm_mem.fused_all_gather_matmul.default._schema
    assert [a.name for a in schema.arguments] == ["A", "Bs", "gather_dim", "group_name", "return_A"]
    schema = torch.ops.symm_mem.fused_matmul_reduce_scatter.default._schema
    assert [a.name for a in schema.arguments] == ["A", "B", "reduce_op", "scatter_dim", "group_name"]
