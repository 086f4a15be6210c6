"""What each rank does in the tests of the collectives, the mesh and the transports."""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_ops import comm, vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from parallel_ops.comm import consistency
from parallel_ops.comm.transport.base import Receive, Send
from parallel_ops.comm.transport.c10d import C10dTransport


def call(rank: int, op: str, shards: list[Tensor], grads: list[Tensor] | None, options: Any) -> tuple[Tensor, Any]:
    """``op`` of this rank's shard, and the gradient of the shard. ``options`` may be one dict per rank."""
    x = shards[rank].clone().requires_grad_(grads is not None)
    kwargs = options[rank] if isinstance(options, list) else options
    # Only here: this process serves other tests too.
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        out = getattr(comm, op)(x, dist.group.WORLD, **kwargs)
        if grads is not None:
            out.backward(grads[rank])
    return out.detach(), x.grad


def written_over(rank: int) -> None:
    """Results that are written to have the gradients of those that are not."""
    group = dist.group.WORLD
    for op in (
        lambda x: comm.all_gather(x, group),
        lambda x: comm.gather_from_group(x, group),
        lambda x: vocab_parallel_cross_entropy(x, torch.arange(3), group=group, reduction="none"),
    ):
        x, y = (torch.ones(3, 4, requires_grad=True) for _ in range(2))
        op(x).mul_(2).sum().backward()
        (op(y) * 2).sum().backward()
        assert torch.equal(x.grad, y.grad)


def disagree(rank: int, op: str, shapes: list[Any], options: list[dict[str, Any]]) -> Tensor:
    """``op`` with this rank's own shape (or something that is no shape, passed as it is) and options."""
    x = torch.ones(shapes[rank]) if isinstance(shapes[rank], tuple) else shapes[rank]
    return getattr(comm, op)(x, dist.group.WORLD, **options[rank])


@contextlib.contextmanager
def group_of(backend: str) -> Iterator[dist.ProcessGroup]:
    """A new group of all ranks. One with NCCL, which needs GPUs, is a gloo group that says of itself what is asked."""
    group = dist.new_group(backend=backend.replace("nccl", "gloo"))
    if "nccl" not in backend:
        yield group
        return
    with mock.patch.object(dist, "get_backend_config", return_value=backend):
        yield group


def wrong_on_one_rank(rank: int, backend: str) -> list[str]:
    """What CPU calls of a group raise of which rank 1 makes every one with arguments that only it can see are wrong."""
    x, target = torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)
    wrong = rank == 1
    said = []
    with group_of(backend) as group:
        for function in (
            lambda: comm.all_gather(x, group, dim=9 if wrong else 0),
            lambda: vocab_parallel_cross_entropy(x, target[: 3 if wrong else 4], group=group),
            lambda: vocab_parallel_linear_cross_entropy(x, x, target, group=group, z_loss=-1.0 if wrong else 0.0),
        ):
            try:
                function()
            except ValueError as error:
                said.append(str(error))
            else:
                said.append("nothing was raised")
    return said


def wrong_gradient(rank: int) -> Any:
    """The ranks go backward through different calls."""
    x, y = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    outs = comm.all_gather(x, dist.group.WORLD), comm.copy_to_group(y, dist.group.WORLD)
    outs[rank].sum().backward()


def both_reductions(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Sums of random tensors, and what they were summed from."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
    return {
        "x": x,
        "all": comm.reduce_from_group(x, dist.group.WORLD),
        "again": comm.reduce_from_group(x, dist.group.WORLD),
        "scattered": comm.reduce_scatter(x, dist.group.WORLD, sizes=comm.shard_sizes(shape[0], dist.get_world_size())),
    }


def double_backward(rank: int) -> bool:
    x = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    group = dist.group.WORLD

    def f(t: Tensor) -> Tensor:
        return comm.reduce_scatter(comm.all_gather(t, group) ** 3, group)

    (grad,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    size = dist.get_world_size()
    return torch.allclose(grad, size * 3 * x**2) and torch.allclose(second, size * 6 * x)


def compiled(rank: int, uneven: bool, backend: str = "aot_eager") -> tuple[Any, Any]:
    """(eager results, compiled results) of a chain through every collective, with gradients."""
    group, size = dist.group.WORLD, dist.get_world_size()
    sizes = list(range(1, size + 1)) if uneven else [2] * size

    def chain(x: Tensor, w: Tensor) -> Tensor:
        y = comm.all_gather(x, group, sizes=sizes) @ comm.copy_to_group(w, group)
        y = comm.reduce_scatter(y.sin(), group, sizes=sizes)
        y = comm.gather_from_group(y, group, sizes=sizes)
        y = comm.scatter_to_group(comm.reduce_from_group(y, group), group, dim=-1)
        return comm.all_to_all(y, group, split_dim=0, concat_dim=1, split_sizes=sizes)

    def run(f: Any) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(sizes[rank], 3, generator=generator, requires_grad=True)
        w = torch.randn(3, 2 * size, generator=generator, requires_grad=True)
        out = f(x, w)
        out.square().sum().backward()
        assert x.grad is not None and w.grad is not None
        return [out.detach(), x.grad, w.grad]

    torch._dynamo.reset()
    return run(chain), run(torch.compile(chain, backend=backend, fullgraph=True))


def transported(rank: int, shifts: list[int], dtype: torch.dtype, backend: str | None = None) -> list[Tensor]:
    """Chunks to the ranks ``shifts`` further on, posted in two batches and waited for out of order."""
    with contextlib.nullcontext(dist.group.WORLD) if backend is None else group_of(backend) as group:
        transport = C10dTransport(group)
    size = transport.size
    batches = []
    for part in (shifts[::2], shifts[1::2]):
        sent = [torch.full((s + 1, 3), 10 * rank + s).to(dtype) for s in part]
        got = [torch.empty(s + 1, 3, dtype=dtype) for s in part]
        chunks = [Send(t, (rank + s) % size) for t, s in zip(sent, part, strict=True)]
        chunks += [Receive(t, (rank - s) % size) for t, s in zip(got, part, strict=True)]
        batches.append((transport.post("test", chunks), got))
    for handles, _ in reversed(batches):
        for handle in reversed(handles):
            handle.wait()
    by_shift: dict[int, Tensor] = {}
    for part, (_, got) in zip((shifts[::2], shifts[1::2]), batches, strict=True):
        by_shift.update(zip(part, got, strict=True))
    return [by_shift[s].double() for s in shifts]


def refused_chunks(rank: int) -> list[str]:
    """What the transports of a gloo group and of one with NCCL say of chunks on other devices."""
    cpu, meta, said = torch.ones(1), torch.ones(1, device="meta"), []
    for backend, tensors in (("gloo", [meta]), ("cpu:gloo,cuda:nccl", [meta]), ("cpu:gloo,meta:x", [cpu, meta])):
        with group_of("gloo") as group:
            transport = C10dTransport(group)
        if backend != "gloo":
            types = tuple(part.partition(":")[0] for part in backend.split(","))
            transport.capabilities = dataclasses.replace(transport.capabilities, device_types=types)
        try:
            transport.post("op", [Send(tensor, 1 - rank) for tensor in tensors])
        except ValueError as error:
            said.append(str(error))
    return said


def compared_once(rank: int) -> tuple[int, int, str]:
    """How often two calls of one kind compare, in a group that asks once, and the error of one of another kind."""
    group = dist.new_group()
    comm.set_consistency_checks(group, "first")
    counts = []
    for _ in range(2):
        with mock.patch.object(consistency, "_compare", side_effect=consistency._compare) as ask:
            total = comm.reduce_from_group(torch.ones(3), group)
        assert total.tolist() == [2.0] * 3
        counts.append(ask.call_count)
    try:
        comm.reduce_from_group(torch.ones(4 + rank), group)
        said = "nothing"
    except ValueError as error:
        said = str(error)
    comm.set_consistency_checks(group, "always")
    with mock.patch.object(consistency, "_compare", side_effect=consistency._compare) as ask:
        comm.reduce_from_group(torch.ones(3), group)
    assert ask.call_count == 1
    return *counts, said
