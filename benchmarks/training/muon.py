"""Muon by owner beside its parts: what four processes compute and send of matrices that they share.

    python -m benchmarks muon [--ranks 4] [--rounds 9]

The matrices of four layers of width 192 (28; 512 in the MLP), fp32, sharded by rows. Median CPU time of the
process that takes longest; the arms take turns:

    step         ``MuonAndAdamW.step``
    arithmetic   the same of one process alone, which has the matrices whole
    transfer     the messages of a step, from and to memory that is there

``step / (arithmetic / ranks + transfer)`` is 1 where nothing is lost by balance, copies and waiting.
"""

import functools
import time
from collections.abc import Callable
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.harness import options
from benchmarks.harness.processes import on_ranks
from benchmarks.harness.timing import HostTimer, Rounds, take_turns
from parallel_ops.train.step.muon import MuonAndAdamW

_SHAPES = [*[(192, 192)] * 4, *[(512, 192)] * 2, (192, 512)] * 4


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Processes that share the matrices.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the median is shown.")] = 9,
) -> None:
    """CPU time of a step of Muon by owner, and of its parts."""
    step, arithmetic, transfer = on_ranks(ranks, _measure, ranks, rounds)
    print(f"step {1e3 * step:.0f} ms, arithmetic {1e3 * arithmetic:.0f} ms, transfer {1e3 * transfer:.0f} ms")
    print(f"step / (arithmetic / {ranks} + transfer) = {step / (arithmetic / ranks + transfer):.3f}")


app = options.single(main)


def _measure(rank: int, ranks: int, rounds: int) -> list[float]:
    """Seconds of a step, of its arithmetic, and of its messages."""
    mesh, generator = init_device_mesh("cpu", (ranks,)), torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    shared = _stepped([distribute_tensor(t, mesh, [Shard(0)]) for t in whole])
    messages: list[tuple[Any, ...]] = []
    with mock.patch.object(dist, "all_to_all_single", functools.partial(_noted, messages, dist.all_to_all_single)):
        shared()
    arms: dict[str, Callable[[], Any]] = {
        "step": shared,
        "arithmetic": _stepped(whole),
        "transfer": functools.partial(_sent, messages),
    }
    timer = HostTimer(torch.device("cpu"), clock=time.process_time, group=dist.group.WORLD)
    longest = torch.tensor([stats.median for stats in take_turns(arms, timer, Rounds(rounds)).values()])
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.tolist()


def _stepped(parameters: list[Tensor]) -> Callable[[], Any]:
    """A step of Muon; gradients are the parameters' first values."""
    for parameter in parameters:
        parameter.requires_grad_().grad = parameter.detach().clone()
    optimizer = MuonAndAdamW([{"params": parameters, "momentum": 0.95, "lr": 1e-3}])
    optimizer.found_inf = torch.zeros(())  # as the trainer gives it
    return optimizer.step


def _noted(messages: list[tuple[Any, ...]], send: Any, *arguments: Any, **options: Any) -> Any:
    messages.append(arguments)
    return send(*arguments, **options)


def _sent(messages: list[tuple[Any, ...]]) -> None:
    for arguments in messages:
        dist.all_to_all_single(*arguments)
