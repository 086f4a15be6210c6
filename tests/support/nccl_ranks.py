"""What each rank, a process, does over the stand-in for NCCL."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_ops import all_gather_linear, column_parallel_linear, linear_reduce_scatter, ring_attention
from parallel_ops.comm import use_transport
from parallel_ops.comm.nccl import connect as nccl
from parallel_ops.comm.nccl.library import Library
from parallel_ops.comm.transport import registry
from parallel_ops.comm.transport.base import Handle, Receive, Send, Transport
from parallel_ops.comm.transport.c10d import C10dTransport
from parallel_ops.comm.transport.exchange import Exchange, start_exchange
from support.expert_parallel import sent
from support.nccl import Fake, load

CPU = torch.device("cpu")


def stand_in(path: str) -> Fake:
    fake = load(path)
    fake.reset()
    return fake


def connected(
    rank: int, path: str, ready: Callable[[], nccl.Ready] | None = None, seconds: float = 30.0, wanted: str = "nccl"
) -> tuple[Any, str]:
    """``connect`` of this rank over the stand-in, on CPU tensors; a group of its own, as ranks connect once."""
    return nccl.connect(
        dist.new_group(timeout=timedelta(seconds=seconds)),
        CPU,
        wanted=wanted,
        ready=lambda device: nccl.Ready(Library.open(path), rank) if ready is None else ready(),
        side=lambda device: SimpleNamespace(cuda_stream=0x1000),
        stream=lambda device: lambda: 0,
    )


@contextlib.contextmanager
def over_nccl(rank: int, path: str, version: int) -> Iterator[Fake]:
    """The ops of all ranks go over the stand-in, which says that it has ``version``."""
    fake = stand_in(path)
    fake.version(version)
    transport, why_not = connected(rank, path)
    assert transport is not None, why_not
    transport.pool.poisoned = True
    use_transport(dist.group.WORLD, transport)
    fake.logging(True)
    try:
        yield fake
    finally:
        use_transport(dist.group.WORLD, None)
        fake.reset()


def _leaf(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _linear(op: Any, rank: int, rows: int, columns: int, **options: Any) -> list[Tensor]:
    x, weight = _leaf(rank, rows, columns), _leaf(10 + rank, 6, columns)
    y = op(x, weight, group=dist.group.WORLD, **options)
    (y * torch.arange(1.0, 7.0)).square().sum().backward()
    return [y.detach(), x.grad, weight.grad]  # type: ignore[list-item]


def _ring(rank: int, size: int, **options: Any) -> list[Tensor]:
    q, k, v = (_leaf(20 + i + 3 * rank, 8, 2, heads, 4) for i, heads in enumerate((4, 2, 2)))
    out = ring_attention(q, k, v, group=dist.group.WORLD, **options)
    out.square().sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]  # type: ignore[list-item]


def results(rank: int) -> dict[str, list[Tensor]]:
    """What the ops of this package compute over the group, by name."""
    size = dist.get_world_size()
    found: dict[str, list[Tensor]] = {}
    for overlap in ("off", "bulk", "tapered", 2):
        found[f"gather {overlap}"] = _linear(all_gather_linear, rank, 4, 5, overlap=overlap)
        found[f"scatter {overlap}"] = _linear(linear_reduce_scatter, rank, 4 * size, 5, overlap=overlap)
        found[f"replicated {overlap}"] = _linear(column_parallel_linear, 0, 5, 5, overlap=overlap)
    sizes = [rank + 1 for rank in range(size)]
    found["uneven gather"] = _linear(all_gather_linear, rank, sizes[rank], 5, sizes=sizes)
    found["uneven scatter"] = _linear(linear_reduce_scatter, rank, sum(sizes), 5, sizes=sizes)
    for name, options in {
        "ring": {"causal": False, "algorithm": "ring"},
        "causal ring": {"algorithm": "ring"},
        "window": {"window": 3, "algorithm": "ring"},
        "contiguous": {"layout": "contiguous", "window": 12, "algorithm": "ring"},
        "gathered keys": {"algorithm": "all_gather"},
        "ulysses": {"ulysses_degree": min(2, size), "algorithm": "hybrid" if size > 2 else "all_to_all"},
    }.items():
        found[name] = _ring(rank, size, **options)
    for chunks in (1, 2):
        found[f"experts {chunks}"] = list(sent(rank, chunks, 2 * size, 2, None, chunks).values())
    return found


def same_bits(rank: int, path: str, version: int) -> tuple[list[str], set[str]]:
    """Which results differ from those over the group's own backend, and which functions of NCCL were called."""
    expected = results(rank)
    with over_nccl(rank, path, version) as fake:
        got = results(rank)
        called = {line.split()[0] for line in fake.calls()}
    wrong = [
        name
        for name, tensors in expected.items()
        if not all(torch.equal(a, b) for a, b in zip(tensors, got[name], strict=True))
    ]
    return wrong, called


def summed_by_nccl(rank: int, path: str) -> list[bool]:
    """Linears whose sums NCCL takes; of integers, so that the order does not show."""
    size, equal = dist.get_world_size(), []
    with over_nccl(rank, path, 22907) as fake:
        x, weight = torch.full((2 * size, 3), rank + 1.0), torch.ones(4, 3)
        y = linear_reduce_scatter(x, weight, group=dist.group.WORLD, reduction="backend")
        equal.append(torch.equal(y, torch.full((2, 4), 3.0 * size * (size + 1) / 2)))
        leaf = torch.ones(2, 3, requires_grad=True)
        column_parallel_linear(leaf, weight, group=dist.group.WORLD, reduction="backend").sum().backward()
        assert leaf.grad is not None
        equal.append(torch.equal(leaf.grad, torch.full((2, 3), 4.0 * size)))
        called = {line.split()[0] for line in fake.calls()}
    return [*equal, called >= {"ReduceScatter", "AllReduce"}]


OP = "exchange"
# Of each rank: rows that it sends to the next ones, with none and with one among them.
ROWS = [[3, 0, 1, 5], [1, 1, 0, 2], [0, 0, 0, 0], [2, 1, 4, 0]]


def _numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    whole = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(seed))
    return whole.to(dtype)


def _waited(handle: Handle | None, tensor: Tensor) -> Tensor:
    assert handle is not None
    handle.wait()
    return tensor.clone()


def exchanges(transport: Transport, dtype: torch.dtype) -> dict[str, Tensor]:
    """What each method of a transport of 4 ranks moves."""
    rank, size, like = transport.rank, transport.size, torch.empty(0, dtype=dtype)
    found: dict[str, Tensor] = {}
    with transport.workspace(OP) as memory:
        mine = _numbers(rank, (2, 3), dtype)
        for place in ("leased", "own"):
            whole = memory.empty((size, 2, 3), like) if place == "leased" else like.new_empty((size, 2, 3))
            found[f"all_gather {place}"] = _waited(transport.all_gather(OP, whole, mine), whole)
            parts = memory.empty((size, 2, 3), like) if place == "leased" else like.new_empty((size, 2, 3))
            parts.copy_(_numbers(10 + rank, (size, 2, 3), dtype))
            found[f"all_to_all {place}"] = _waited(transport.all_to_all(OP, whole, parts), whole)
            if dtype in (torch.float32, torch.float64, torch.int64):
                total = like.new_empty((2, 3))
                found[f"reduce_scatter {place}"] = _waited(transport.reduce_scatter(OP, total, parts), total)
                found[f"all_reduce {place}"] = _waited(transport.all_reduce(OP, parts), parts)
        leaving, arriving = ROWS[rank], [row[rank] for row in ROWS]
        sent, got = _numbers(rank, (sum(leaving), 3), dtype), like.new_empty((sum(arriving), 3))
        found["uneven all_to_all"] = _waited(start_exchange(OP, transport, got, sent, (arriving, leaving)), got)
        # Every rank's rows to all others, at their places in leased memory, of which each has as much.
        sizes = [5, 1, 0, 2]
        ends = [0, *accumulate(sizes)]
        whole = memory.empty((sum(sizes), 3), like)
        own = whole[ends[rank] : ends[rank + 1]]
        own.copy_(_numbers(20 + rank, (sizes[rank], 3), dtype))
        others = [(rank + k) % size for k in range(1, size)]
        messages = Exchange(
            OP,
            transport,
            [Send(own, peer, own) for peer in others],
            [Receive(whole[ends[peer] : ends[peer + 1]], peer) for peer in others],
        )
        found["uneven messages"] = _waited(messages, whole)
    transport.barrier(OP)
    return found


def differing(rank: int, path: str, version: int) -> list[str]:
    """Exchanges that have other bits over NCCL than over the group's own backend."""
    wrong = []
    with over_nccl(rank, path, version):
        transport = registry.transport_of(dist.group.WORLD, CPU)
        assert transport.capabilities.name == "nccl"
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.float64):
            expected = exchanges(C10dTransport(dist.group.WORLD), dtype)
            for name, tensor in exchanges(transport, dtype).items():
                if not torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)):
                    wrong.append(f"{name} of {dtype}")
    return wrong


def limited(rank: int, path: str) -> list[bool]:
    """Which leases are of registered memory, as rank 1 has none left after the first segment."""
    fake = stand_in(path)
    transport, why_not = connected(rank, path)
    assert transport is not None, why_not
    like, found = torch.empty(0, dtype=torch.uint8), []
    for leases in (1, 2):
        with transport.workspace(OP) as memory:
            each = [memory.empty((60 << 20,), like) for _ in range(leases)]
            found += [transport.pool.find(x.data_ptr()) is not None for x in each]
        fake.memory(1 << 20 if rank == 1 else 1 << 40)
    transport.barrier(OP)
    return found


def outcomes(rank: int, path: str) -> dict[str, str]:
    """Why each of these groups of two has no communicator, as this rank says; the library is the stand-in."""
    fake = stand_in(path)

    def versioned(code: int) -> nccl.Ready:
        fake.version(code)
        return nccl.Ready(Library.open(path), rank)

    def broken() -> nccl.Ready:
        raise OSError("no such device")

    second = rank == 1
    cases: dict[str, Callable[[], nccl.Ready] | None] = {
        "works": None,
        "another version": lambda: versioned(22809 if second else 22907),
        "shared GPU": lambda: nccl.Ready(Library.open(path), 7),
        "no library": (lambda: nccl.Ready(reason=4, detail="neither loaded nor installed")) if second else None,
        "broken": broken if second else None,
    }
    found = {}
    for name, ready in cases.items():
        fake.version(22907)
        found[name] = connected(rank, path, ready)[1]
    found["unwanted"] = connected(rank, path, wanted="c10d" if second else "nccl")[1]
    try:
        connected(rank, path, wanted="ncll" if second else "nccl")
    except ValueError as error:
        found["misspelt"] = str(error)
    start = time.monotonic()
    if second:
        fake.fail("CommInitRankConfig", 2)
    found["fails"] = connected(rank, path, seconds=4.0)[1]
    assert time.monotonic() - start < 8
    fake.reset()
    fake.fail("GetUniqueId", 2)
    found["no id"] = connected(rank, path)[1]
    fake.reset()
    fake.puts(not second)
    transport, _ = connected(rank, path)
    found["puts"] = str(transport.puts)
    fake.reset()
    return found


def chosen(rank: int, answer: str) -> dict[str, object]:
    """What the registry does with tensors on CUDA, where ``connect`` gives ``answer``."""
    calls: list[str] = []
    lines: list[str] = []
    given = SimpleNamespace(rank=rank, size=2, capabilities=SimpleNamespace(name="nccl"))
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger, connect, group = logging.getLogger(registry.__name__), registry.connect, dist.new_group()
    assert group is not None
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    registry.connect = lambda group, device, wanted: calls.append(wanted) or (None if answer else given, answer)  # type: ignore[assignment,func-returns-value]
    try:
        before = registry.why_not_nccl(group)
        cpu = registry.transport_of(group, CPU).capabilities.name
        names = [registry.transport_of(group, torch.device("cuda", rank)).capabilities.name for _ in range(2)]
    finally:
        registry.connect = connect
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return {
        "before": before,
        "cpu": cpu,
        "names": names,
        "calls": calls,
        "why": registry.why_not_nccl(group),
        "log": lines,
    }


def captured(rank: int, path: str, version: int) -> dict[str, object]:
    """Exchanges that are captured in a graph and launched three times."""
    fake = stand_in(path)
    fake.version(version)
    transport, why_not = connected(rank, path)
    assert transport is not None, why_not
    size, x = transport.size, torch.zeros(2, 3)
    with transport.workspace(OP) as memory:
        memory.empty((64,), x)  # so that there is a segment
    whole, total, got = torch.zeros(size, 2, 3), torch.zeros(2, 3), torch.zeros(2, 3)
    # On one rank an exchange is on its way meanwhile, and a thread looks at its event.
    time.sleep(0.2 * rank)
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    (pending, _) = transport.post(OP, [Send(torch.ones(4), ahead), Receive(torch.empty(4), behind)])
    fake.capture_begin()
    with transport.workspace(OP) as memory:
        assert memory.empty((1 << 28,), x).numel() == 1 << 28  # no segment can be made now
        mine = memory.empty((2, 3), x)
        leased = transport.pool.find(mine.data_ptr()) is not None
        transport.all_gather(OP, whole, x).wait()
        transport.reduce_scatter(OP, total, whole).wait()
        handles = transport.post(OP, [Send(x, ahead, x), Receive(got, behind)])
        for handle in handles:
            handle.wait()
    time.sleep(0.1)
    steps = fake.capture_end()
    done_while_captured = bool(whole.any() or total.any() or got.any())
    pending.wait()
    right = []
    for launch in range(1, 4):
        x.fill_(launch * (rank + 1))
        fake.replay()
        right += [
            torch.equal(whole[:, 0, 0], launch * torch.arange(1.0, size + 1)),
            torch.equal(total, torch.full((2, 3), size * launch * (rank + 1.0))),
            torch.equal(got, torch.full((2, 3), launch * (behind + 1.0))),
        ]
        dist.barrier()
    return {"steps": steps > 0, "early": done_while_captured, "leased": leased, "right": all(right)}
