"""ring_attention compiled, checkpointed, under autocast, as an op of torch, and on one rank."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from parallel_ops import flash_attention, ring_attention
from parallel_ops.comm import use_transport
from parallel_ops.comm.transport.c10d import C10dTransport
from parallel_ops.context_parallel import SequenceLayout, ring_attention_reference
from parallel_ops.ops.attention.options import AttentionOptions
from support.numerics import suite
from support.parallelism.context_parallel import inputs
from support.ranks.distributed import ranks


def _gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    out.float().square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def compiled(rank: int, algorithm: str, dynamic: bool | None = None) -> list[list[Tensor]]:
    """(O, dq, dk, dv), eager and compiled to one graph, for two lengths."""
    torch._dynamo.reset()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = None if algorithm == "ring" else dist.get_world_size() * q.shape[0]
        return F.gelu(
            ring_attention(q * 1, k, v, group=dist.group.WORLD, algorithm=algorithm, window_size=(4, 0), length=length)
        )

    results, function = [], torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for s in (4, 6, 7):
        for f in (run, function):
            leaves = inputs(rank, s)
            results.append(_gradients(f(*leaves), leaves))
    return results


def with_autocast(rank: int) -> list[list[Tensor]]:
    """Under autocast, and with inputs cast before."""
    sink = torch.randn(4, generator=torch.Generator().manual_seed(5))
    leaves = inputs(rank)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ring_attention(*leaves, group=dist.group.WORLD, sink=sink)
    cast = [t.detach().bfloat16().requires_grad_() for t in leaves]
    return [_gradients(out, leaves), _gradients(ring_attention(*cast, group=dist.group.WORLD, sink=sink), cast)]


def checkpointed(rank: int, how: str, algorithm: str) -> tuple[list[Tensor], list[Tensor], int]:
    """(O, dq, dk, dv) plainly and recomputed, and how often the forward ran in the latter."""
    calls = 0

    class Counting(C10dTransport):
        def post(self, op: str, chunks: Any) -> Any:
            nonlocal calls
            calls += 1
            return super().post(op, chunks)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q * 1, k, v, group=dist.group.WORLD, algorithm=algorithm, dropout_p=0.4)

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op is torch.ops.parallel_ops.ring_attention.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def recomputing(*leaves: Tensor) -> Tensor:
        if how == "selective":
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(run, *leaves, use_reentrant=False, context_fn=contexts)
        return checkpoint(run, *leaves, use_reentrant=how == "reentrant")

    results = []
    use_transport(dist.group.WORLD, Counting(dist.group.WORLD))
    try:
        for f in (run, recomputing):
            calls = 0
            torch.manual_seed(3)  # the same on every rank
            leaves = inputs(rank)
            results.append(_gradients(f(*leaves), leaves))
            results.append(calls)
    finally:
        use_transport(dist.group.WORLD, None)
    plain, once, again, posted = results
    return plain, again, posted - once


def by_reference(rank: int) -> list[list[Tensor]]:
    """(O, dq, dk, dv), by the op and by its reference, which has second derivatives too."""
    length, results = 9, []
    s = SequenceLayout(length, dist.get_world_size()).lengths[rank]
    for op in (ring_attention, ring_attention_reference):
        leaves = inputs(rank, s, dtype=torch.float64)
        results.append(
            _gradients(op(*leaves, group=dist.group.WORLD, length=length, window_size=(3, 0), softcap=3.0), leaves)
        )
    leaves = inputs(rank, s, dtype=torch.float64)
    out = ring_attention_reference(*leaves, group=dist.group.WORLD, length=length)
    (first,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    first.square().sum().backward()
    assert leaves[0].grad is not None
    return results


def opcheck(rank: int, algorithm: str) -> None:
    q, k, v = inputs(rank, 4)
    name, size = dist.group.WORLD.group_name, dist.get_world_size()
    ways = {"ring": (1, False), "all_to_all": (2, False), "all_gather": (1, True)}
    options = AttentionOptions(softmax_scale=0.3, right=0)
    arguments = (*options, name, 4 * size, "zigzag", *ways[algorithm], 8, True)
    suite.check_op(torch.ops.parallel_ops.ring_attention.default, [q, k, v, *arguments])


@pytest.mark.parametrize("algorithm", ["ring", "all_to_all"])
@pytest.mark.parametrize(("how", "recomputed"), [("reentrant", True), ("plain", True), ("selective", False)])
def test_activation_checkpointing(algorithm, how, recomputed):
    """Dropout included; a policy that saves the op runs it once."""
    for plain, again, posted in ranks(2).run(checkpointed, how, algorithm):
        assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
        assert (posted > 0) == recomputed


@pytest.mark.parametrize(
    ("algorithm", "dynamic"), [("all_to_all", None), ("auto", None), ("auto", True), ("ring", None)]
)
def test_compiles_to_one_graph_for_any_length(algorithm, dynamic):
    for results in ranks(2).run(compiled, algorithm, dynamic):
        for eager, one_graph in zip(results[::2], results[1::2], strict=True):
            torch.testing.assert_close(one_graph, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["ring", "all_to_all", "all_gather"])
def test_custom_op_contract(algorithm):
    ranks(2).run(opcheck, algorithm)


def test_autocast_runs_in_its_dtype():
    for auto, cast in ranks(2).run(with_autocast):
        assert auto[0].dtype is torch.bfloat16 and torch.equal(auto[0], cast[0])
        assert all(got.dtype is torch.float32 for got in auto[1:])
        assert all(torch.equal(got, want.float()) for got, want in zip(auto[1:], cast[1:], strict=True))


def test_the_reference_means_the_same():
    for op, reference in ranks(2).run(by_reference):
        torch.testing.assert_close(op, reference, rtol=1e-10, atol=1e-12)


class TestOneRank:
    def test_is_flash_attention(self):
        q, k, v = inputs(0)
        options = {"window_size": (2, 0), "sink": torch.ones(4), "dropout_p": 0.2, "dropout_seed": 5}
        got = ring_attention(q, k, v, group=None, cp_layout="striped", algorithm="hybrid", length=4, **options)
        assert torch.equal(got, flash_attention(q, k, v, **options))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"cp_layout": "blocks"}, ValueError, "cp_layout must be one of"),
            ({"algorithm": "usp"}, ValueError, "algorithm must be one of"),
            ({"length": 5}, ValueError, "rank 0 of 1 has 5 of length=5 tokens in zigzag layout, but q has 4"),
            ({"length": 4.0}, TypeError, "length must be an int or None, got float"),
            ({"ulysses_degree": 1}, ValueError, "ulysses_degree is for algorithm"),
            (
                {"ulysses_degree": "all", "algorithm": "hybrid"},
                TypeError,
                "ulysses_degree must be an int or None, got str",
            ),
            ({"group": "cp"}, TypeError, "group must be None or a torch.distributed.ProcessGroup"),
        ],
    )
    def test_bad_arguments_are_named(self, options, error, message):
        with pytest.raises(error, match=message):
            ring_attention(*inputs(0), **{"group": None, **options})
