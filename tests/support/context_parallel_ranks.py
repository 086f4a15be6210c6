"""What each rank does in the tests of ring_attention over process groups."""

import functools
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from parallel_ops.comm import use_transport
from parallel_ops.comm.transport.c10d import C10dTransport
from parallel_ops.context_parallel import (
    SequenceLayout,
    join_sequence,
    ring_attention,
    ring_attention_algorithm,
    ring_attention_reference,
    split_sequence,
)
from support.context_parallel import SEED, Case


def public(case: Case, group: Any, tensors: list[Tensor | None], algorithm: str = "", **options: Any) -> list[Tensor]:
    """(O, dq, dk, dv, dsink) of this rank's tokens, by the public op."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    layout = SequenceLayout(case.length, size, case.layout)
    q, k, v, sink, grad = tensors
    leaves = [layout.shard(t, rank).requires_grad_() for t in (q, k, v)]
    sink = None if sink is None else sink.clone().requires_grad_()
    if not algorithm:
        algorithm = "all_gather" if case.all_gather else "ring" if case.ulysses_degree == 1 else "hybrid"
        options["ulysses_degree"] = case.ulysses_degree if algorithm == "hybrid" else None
    out = ring_attention(
        *leaves,
        group=group,
        layout=case.layout,
        algorithm=algorithm,
        causal=case.causal,
        scale=case.scale,
        window=case.window,
        sink=sink,
        softcap=case.softcap or None,
        dropout_p=case.dropout_p,
        seed=SEED,
        cu_seqlens=case.cu_seqlens,
        length=case.length,
        **options,
    )
    out.backward(layout.shard(grad, rank))
    return [out.detach(), *(t.grad for t in (*leaves, sink) if t is not None)]


def cases(rank: int, what: list[Case], dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """``public`` of each case."""
    return [public(case, dist.group.WORLD, case.tensors(dtype)) for case in what]


def inputs(
    rank: int, s: int = 4, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32, d_v: int = 6
) -> list[Tensor]:
    """Leaves q, k and v of one rank."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(s, 2, *shape) for shape in ((heads, 8), (kv_heads, 8), (kv_heads, d_v))]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def _gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    out.float().square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def repeated(rank: int, case: Case, times: int) -> list[list[Tensor]]:
    return [public(case, dist.group.WORLD, case.tensors(torch.bfloat16)) for _ in range(times)]


def compiled(rank: int, algorithm: str) -> list[list[Tensor]]:
    """(O, dq, dk, dv), eager and compiled to one graph, for two lengths."""
    torch._dynamo.reset()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = None if algorithm == "ring" else dist.get_world_size() * q.shape[0]
        return F.gelu(ring_attention(q * 1, k, v, group=dist.group.WORLD, algorithm=algorithm, window=5, length=length))

    results, function = [], torch.compile(run, fullgraph=True, backend="aot_eager")
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


def half_joined(rank: int, length: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's part of a sequence, the sequence joined again, and the gradient of the part."""
    whole = torch.arange(2.0 * length).view(2, length)
    part = split_sequence(whole, dist.group.WORLD, layout=kind, dim=1).requires_grad_()
    joined = join_sequence(part, dist.group.WORLD, length=length, layout=kind, dim=-1)
    (joined * whole).sum().backward()
    return part.detach(), joined.detach(), part.grad


def mismatched(rank: int, what: str) -> None:
    """Calls that differ between ranks, or that one rank alone sees to be wrong."""
    world = dist.get_world_size()
    last = rank == world - 1
    s, heads = {"tokens": (6 + rank, 4), "heads": (6, 4 + 2 * rank)}.get(what, (6, 4))
    options: dict[str, Any] = {
        "layout": {"layout": "striped" if rank else "zigzag"},
        "algorithm": {"algorithm": "all_gather" if rank else "ring"},
        "window": {"window": 4 + rank},
        "seed": {"dropout_p": 0.5, "seed": rank},
        "documents": {"cu_seqlens": torch.tensor([0, 3 + rank, 6 * world])},
        "documents too short": {"cu_seqlens": torch.tensor([0, 3, 6])},
        "documents that fall": {"cu_seqlens": torch.tensor([0, 5, 3, 6 * world])},
        "length": {"length": 6 * world - 1},
        "one bad argument": {"window": 0 if last else 4},
    }.get(what, {})
    torch.set_grad_enabled(what != "gradients" or bool(rank))
    try:
        ring_attention(*inputs(rank, s, heads), group=dist.group.WORLD, **options)
    finally:
        torch.set_grad_enabled(True)


def refused(rank: int, options: dict[str, Any], change: dict[str, Any]) -> None:
    """A call that is wrong in the same way on every rank."""
    q, k, v = inputs(rank, **change)
    ring_attention(q, k, v, group=dist.group.WORLD, **options)


def by_reference(rank: int) -> list[list[Tensor]]:
    """(O, dq, dk, dv), by the op and by its reference, which has second derivatives too."""
    length, results = 9, []
    s = SequenceLayout(length, dist.get_world_size()).lengths[rank]
    for op in (ring_attention, ring_attention_reference):
        leaves = inputs(rank, s, dtype=torch.float64)
        results.append(_gradients(op(*leaves, group=dist.group.WORLD, length=length, window=4, softcap=3.0), leaves))
    leaves = inputs(rank, s, dtype=torch.float64)
    out = ring_attention_reference(*leaves, group=dist.group.WORLD, length=length)
    (first,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    first.square().sum().backward()
    assert leaves[0].grad is not None
    return results


def goes_on(rank: int) -> Tensor:
    """After errors the group is as good as before."""
    return ring_attention(*inputs(rank), group=dist.group.WORLD).detach()


def why(rank: int) -> str:
    q, k, _ = inputs(rank)
    return ring_attention_algorithm(q, k, group=dist.group.WORLD).reason


def killed(rank: int, victim: int) -> None:
    """A rank ends without a word."""
    out = ring_attention(*inputs(rank), group=dist.group.WORLD, algorithm="ring")
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    out.sum().backward()


SUB_GROUP_CASE = Case(11, heads=4, kv_heads=2)


def sub_groups(rank: int) -> list[Tensor]:
    """Two rings of two ranks at once, on ranks that are not adjacent."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return public(SUB_GROUP_CASE, groups[rank % 2], SUB_GROUP_CASE.tensors())


def opcheck(rank: int, algorithm: str) -> None:
    from support import suite

    q, k, v = inputs(rank, 4)
    name, size = dist.group.WORLD.group_name, dist.get_world_size()
    ways = {"ring": (1, False), "all_to_all": (2, False), "all_gather": (1, True)}
    arguments = (name, 4 * size, 8, "zigzag", *ways[algorithm], True, 0.3, None, 0.0, 0.0, 0, "auto", True)
    suite.check_op(torch.ops.parallel_ops.ring_attention.default, [q, k, v, None, None, None, *arguments])
