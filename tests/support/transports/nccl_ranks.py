"""What each rank, a process, does over the stand-in for NCCL."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_ops import all_gather_linear, column_parallel_linear, linear_reduce_scatter, ring_attention
from parallel_ops.comm import use_transport
from parallel_ops.comm.nccl import connect as nccl
from parallel_ops.comm.nccl.library import Library, NotSupported
from parallel_ops.comm.transport import registry
from parallel_ops.comm.transport.base import Exchange, Handle, Receive, Send, Transport, start_exchange
from parallel_ops.comm.transport.c10d import C10dTransport
from support.parallelism.expert_parallel import sent
from support.transports.nccl import Fake, load

CPU = torch.device("cpu")


def stand_in(path: str) -> Fake:
    fake = load(path)
    fake.reset()
    return fake


def connected(
    rank: int, path: str, library: Any = None, seconds: float = 30.0, gpu: int | None = None, group: Any = None
) -> Transport:
    """``connect`` of this rank over the stand-in, on CPU tensors; a group of its own, as ranks connect once."""
    return nccl.connect(
        group or dist.new_group(timeout=timedelta(seconds=seconds)),
        CPU,
        library=library or (lambda: Library.open(path)),
        gpu=lambda device: rank if gpu is None else gpu,
        stream=lambda device: lambda: 0,
    )


@contextlib.contextmanager
def over_nccl(rank: int, path: str) -> Iterator[Fake]:
    """The ops of all ranks go over the stand-in."""
    fake = stand_in(path)
    use_transport(dist.group.WORLD, connected(rank, path))
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
    for overlap in ("off", 1, 2):
        found[f"gather {overlap}"] = _linear(all_gather_linear, rank, 4, 5, overlap=overlap)
        found[f"scatter {overlap}"] = _linear(linear_reduce_scatter, rank, 4 * size, 5, overlap=overlap)
        found[f"replicated {overlap}"] = _linear(column_parallel_linear, 0, 5, 5, overlap=overlap)
    sizes = [rank + 1 for rank in range(size)]
    found["uneven gather"] = _linear(all_gather_linear, rank, sizes[rank], 5, sizes=sizes)
    found["uneven scatter"] = _linear(linear_reduce_scatter, rank, sum(sizes), 5, sizes=sizes)
    for name, options in {
        "ring": {"causal": False, "algorithm": "ring"},
        "causal ring": {"algorithm": "ring"},
        "window": {"window_size": (2, 0), "algorithm": "ring"},
        "contiguous": {"cp_layout": "contiguous", "window_size": (11, 0), "algorithm": "ring"},
        "gathered keys": {"algorithm": "all_gather"},
        "ulysses": {"ulysses_degree": min(2, size), "algorithm": "hybrid" if size > 2 else "all_to_all"},
    }.items():
        found[name] = _ring(rank, size, **options)
    for chunks in (1, 2):
        found[f"experts {chunks}"] = list(sent(rank, chunks, 2 * size, 2, None, chunks).values())
    return found


def same_bits(rank: int, path: str) -> tuple[list[str], set[str]]:
    """Which results differ from those over the group's own backend, and which functions of NCCL were called."""
    expected = results(rank)
    with over_nccl(rank, path) as fake:
        got = results(rank)
        called = {line.split()[0] for line in fake.calls()}
    equal = {name: all(map(torch.equal, tensors, got[name])) for name, tensors in expected.items()}
    return [name for name, same in equal.items() if not same], called


def summed_by_nccl(rank: int, path: str) -> list[bool]:
    """Linears whose sums NCCL takes; of integers, so that the order does not show."""
    size, equal = dist.get_world_size(), []
    with over_nccl(rank, path) as fake:
        x, weight = torch.full((2 * size, 3), rank + 1.0), torch.ones(4, 3)
        y = linear_reduce_scatter(x, weight, group=dist.group.WORLD, grad_reduce="backend")
        equal.append(torch.equal(y, torch.full((2, 4), 3.0 * size * (size + 1) / 2)))
        leaf = torch.ones(2, 3, requires_grad=True)
        column_parallel_linear(leaf, weight, group=dist.group.WORLD, grad_reduce="backend").sum().backward()
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
    mine, whole = _numbers(rank, (2, 3), dtype), like.new_empty((size, 2, 3))
    found["all_gather"] = _waited(transport.all_gather(OP, whole, mine), whole)
    parts = _numbers(10 + rank, (size, 2, 3), dtype)
    found["all_to_all"] = _waited(transport.all_to_all(OP, whole, parts), whole)
    if dtype in (torch.float32, torch.float64, torch.int64):
        total = like.new_empty((2, 3))
        found["reduce_scatter"] = _waited(transport.reduce_scatter(OP, total, parts), total)
        found["all_reduce"] = _waited(transport.all_reduce(OP, parts), parts)
    leaving, arriving = ROWS[rank], [row[rank] for row in ROWS]
    sent, got = _numbers(rank, (sum(leaving), 3), dtype), like.new_empty((sum(arriving), 3))
    found["uneven all_to_all"] = _waited(start_exchange(OP, transport, got, sent, (arriving, leaving)), got)
    ahead, behind, arrived = (rank + 1) % size, (rank - 1) % size, like.new_empty((2, 3))
    found["messages"] = _waited(Exchange(OP, transport, [Send(mine, ahead)], [Receive(arrived, behind)]), arrived)
    return found


def differing(rank: int, path: str) -> list[str]:
    """Exchanges that have other bits over NCCL than over the group's own backend."""
    wrong = []
    with over_nccl(rank, path):
        transport = registry.transport_of(dist.group.WORLD, CPU)
        assert transport.capabilities.name == "nccl"
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.float64):
            expected = exchanges(C10dTransport(dist.group.WORLD), dtype)
            for name, tensor in exchanges(transport, dtype).items():
                if not torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)):
                    wrong.append(f"{name} of {dtype}")
    return wrong


def outcomes(rank: int, path: str) -> dict[str, str]:
    """The error of this rank in each of these groups of two; the library is the stand-in."""
    fake = stand_in(path)

    def versioned(code: int) -> Any:
        fake.version(code)
        return Library.open(path)

    def without(error: Exception) -> Any:
        raise error

    second = rank == 1
    cases: dict[str, dict[str, Any]] = {
        "works": {},
        "another version": {"library": lambda: versioned(22809 if second else 22907)},
        "shared GPU": {"gpu": 7},
        "no library": {"library": (lambda: without(NotSupported("NCCL was not found"))) if second else None},
        "none": {"library": lambda: without(ImportError("the NCCL binding could not be loaded"))},
    }
    found = {}
    for name, options in cases.items():
        fake.version(22907)
        found[name] = _said(lambda options=options: connected(rank, path, **options))
    fake.reset()
    start = time.monotonic()
    if second:
        fake.fail("CommInitRankConfig", 2)
    found["fails"] = _said(lambda: connected(rank, path, seconds=2.0))
    assert time.monotonic() - start < 20
    fake.reset()
    fake.fail("GetUniqueId", 2)
    found["no id"] = _said(lambda: connected(rank, path))
    fake.reset()
    return found


def _said(run: Callable[[], object]) -> str:
    try:
        run()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def two_lives(rank: int, path: str) -> list[bool]:
    """Whether ranks connect again over one store in a group of the same name, as after destroy_process_group."""
    fake = stand_in(path)
    group = dist.new_group(timeout=timedelta(seconds=10))
    made = []
    for _ in range(2):
        transport = connected(rank, path, group=group)
        x = torch.zeros(2)
        made.append(_waited(transport.all_gather(OP, x, torch.full((1,), rank + 1.0)), x).tolist() == [1.0, 2.0])
        del transport
    fake.reset()
    return made


def chosen(rank: int, variable: str | None, argument: str | None) -> dict[str, object]:
    """What the registry does with tensors on CUDA, where a communicator could be made."""
    given = SimpleNamespace(rank=rank, size=2, capabilities=SimpleNamespace(name="nccl"))
    handler = mock.Mock(level=logging.NOTSET)
    logger, group = logging.getLogger(registry.__name__), dist.new_group()
    assert group is not None
    logger.addHandler(handler)
    variables = {**os.environ, "PARALLEL_OPS_TRANSPORT": variable}
    variables = {name: value for name, value in variables.items() if value is not None}
    try:
        with (
            mock.patch.dict(os.environ, variables, clear=True),
            mock.patch.object(registry, "connect", return_value=given) as connect,
        ):
            if argument is not None:
                use_transport(group, argument)  # type: ignore[arg-type]
            cpu = registry.transport_of(group, CPU).capabilities.name
            names = [registry.transport_of(group, torch.device("cuda", rank)).capabilities.name for _ in range(2)]
            order = os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT")
    finally:
        logger.removeHandler(handler)
    return {"cpu": cpu, "names": names, "calls": connect.call_count, "log": handler.handle.call_count, "order": order}


def misspelt(rank: int) -> None:
    """One rank's variable has no such transport; the other makes its call."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    with mock.patch.dict(os.environ, {"PARALLEL_OPS_TRANSPORT": "ncll" if rank == 1 else "c10d"}):
        all_gather_linear(torch.ones(2, 3), torch.ones(4, 3), group=group)


def captured(rank: int, path: str) -> dict[str, object]:
    """Exchanges that are captured in a graph and launched three times."""
    fake = stand_in(path)
    transport = connected(rank, path)
    size, x = transport.size, torch.zeros(2, 3)
    whole, total, got = torch.zeros(size, 2, 3), torch.zeros(2, 3), torch.zeros(2, 3)
    # On one rank an exchange is on its way meanwhile, and a thread looks at its event.
    time.sleep(0.2 * rank)
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    (pending, _) = transport.post(OP, [Send(torch.ones(4), ahead), Receive(torch.empty(4), behind)])
    fake.capture_begin()
    for handle in (transport.all_gather(OP, whole, x), transport.reduce_scatter(OP, total, whole)):
        _waited(handle, x)
    for handle in transport.post(OP, [Send(x, ahead), Receive(got, behind)]):
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
    return {"steps": steps > 0, "early": done_while_captured, "right": all(right)}
