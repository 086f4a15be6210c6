"""The command line: ``python -m benchmarks expert_exchange``: how much of the messages between experts is hidden.

    python -m benchmarks expert_exchange [--share 0.5] [--chunks 2] [--rounds 9]

A layer of experts over two processes with a thread each, forward and backward: the experts in groups, and in a pair,
the forward of one micro-batch beside the backward of another, as DualPipe-V has them. Messages go over gloo, and arrive
when a link of the given speed would have brought them, those of one direction one after the other. The link is as fast
as a share asks for: its time is that share of the time of the layer without it.

    hidden = (computation + messages - measured) / min(computation, messages)
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Annotated
from unittest import mock

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from benchmarks.harness import options
from benchmarks.harness.processes import on_ranks
from benchmarks.harness.timing import CallTimer, Rounds, take_turns
from benchmarks.parallel.link import SimulatedLink
from parallel_ops import ParallelMesh
from parallel_ops._internal.command_line import fail
from parallel_ops._internal.distributed.turns import together
from parallel_ops.expert_parallel.exchange import Exchange
from parallel_ops.layers import ParallelMoE
from parallel_ops.train.launch.malloc import keep_freed_memory

_RANKS = 2


def main(
    share: Annotated[
        list[float] | None, typer.Option(min=0, help="Of messages in the computation; repeatable.")
    ] = None,
    chunks: Annotated[list[int] | None, typer.Option(min=1, help="Groups of a rank's experts; repeatable.")] = None,
    experts: Annotated[int, typer.Option(min=1, help="Of the layer.")] = 16,
    top_k: Annotated[int, typer.Option(min=1, help="Experts of a token.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Of each rank.")] = 2_048,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 512,
    ffn: Annotated[int, typer.Option(min=1, help="Width of an expert.")] = 512,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of which the median is shown, after one that is not timed.")
    ] = 9,
) -> None:
    """Times of a layer whose experts are computed in groups, over a link whose time is a share of the computation."""
    shares, groups = share or [0.25, 0.5, 1.0], chunks or [1, 2, 4]
    if not min(shares) > 0:
        fail(f"--share must be positive, got {min(shares):g}")
    if any(n < 1 or experts // _RANKS % n for n in groups):
        fail(f"--chunks must divide the {experts // _RANKS} experts of a rank, got {', '.join(map(str, groups))}")
    sizes = {"experts": experts, "top_k": top_k, "tokens": tokens, "hidden": hidden, "ffn": ffn}
    computation, size, found = on_ranks(_RANKS, measure, sizes, shares, groups, rounds)
    typer.echo(
        f"experts over {_RANKS} processes, forward and backward: {tokens} tokens of {hidden}, {experts} experts of "
        f"{ffn}, top {top_k}, float32; {computation * 1e3:.1f} ms without a link, {size / 1e6:.1f} MB sent"
    )
    table = options.table("messages ms", "experts", "ms", "hidden", "/ first", left=("experts",))
    for number, part in enumerate(shares):
        messages, first = part * computation, next(iter(found.values()))[number]
        for way, times in found.items():
            hidden_share = (computation + messages - times[number]) / min(computation, messages)
            table.add_row(
                f"{messages * 1e3:.1f}", way, f"{times[number] * 1e3:.1f}", f"{hidden_share:.2f}",
                f"{times[number] / first:.2f}",
            )  # fmt: skip
    options.console().print(table)


app = options.single(main)


class Pace:
    """Messages of this rank that end no earlier than over a link, and their bytes."""

    def __init__(self) -> None:
        self.link: SimulatedLink | None = None
        self.bytes = 0
        self._free = 0.0
        self._due: dict[int, float] = {}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Every ``Exchange`` is paced in the block."""
        send, wait = Exchange.send, Exchange.wait

        def sending(exchange: Exchange, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
            size = x[: sum(sent)].nbytes - x[: sent[exchange.group.rank()]].nbytes
            self.bytes += size
            if self.link is not None:
                self._free = max(self._free, time.perf_counter()) + self.link.seconds(size)
                self._due[id(exchange)] = self._free
            return send(exchange, x, sent, received)

        def waiting(exchange: Exchange) -> None:
            wait(exchange)
            if (left := self._due.pop(id(exchange), 0.0) - time.perf_counter()) > 0:
                time.sleep(left)

        with mock.patch.object(Exchange, "send", sending), mock.patch.object(Exchange, "wait", waiting):
            yield


def measure(
    rank: int, sizes: dict[str, int], shares: list[float], chunks: list[int], rounds: int
) -> tuple[float, int, dict[str, list[float]]]:
    """Seconds of the fastest way without a link, bytes, and seconds of each way by share."""
    keep_freed_memory()  # as the trainer does: otherwise each way faults in pages after those of another
    mesh = ParallelMesh(dp_shard=_RANKS, ep=_RANKS)
    generator = torch.Generator().manual_seed(rank)
    x, grad = (torch.randn(sizes["tokens"], sizes["hidden"], generator=generator) for _ in range(2))
    pace = Pace()

    def layer_of(n: int) -> ParallelMoE:
        torch.manual_seed(0)
        return ParallelMoE(
            sizes["hidden"], sizes["ffn"], sizes["experts"], sizes["top_k"], tp_mesh=None, ep_mesh=mesh["ep"],
            overlap=n, init_method=functools.partial(torch.nn.init.normal_, std=0.02),
        )  # fmt: skip

    def timed(layer: ParallelMoE, run: Callable[[Callable[[], Tensor], Callable[[], None]], object]) -> float:
        """The forward of one micro-batch and the backward of another."""
        link, pace.link = pace.link, None
        before = layer(x.clone().requires_grad_())
        after: list[Tensor] = []

        def forward() -> Tensor:
            after.append(layer(x.clone().requires_grad_()))
            return after[0]

        pace.link = link
        dist.barrier()
        start = time.perf_counter()
        run(forward, functools.partial(before.backward, grad))
        dist.barrier()
        seconds = time.perf_counter() - start
        pace.link = None
        after[0].backward(grad)
        layer.zero_grad()
        pace.link = link
        return seconds

    def in_turn(forward: Callable[[], Tensor], backward: Callable[[], None]) -> None:
        forward()
        backward()

    ways = {f"{n} group{'s' * (n > 1)}": functools.partial(timed, layer_of(n), in_turn) for n in chunks}
    ways["in a pair"] = functools.partial(timed, layer_of(1), together)

    def medians(link: SimulatedLink | None) -> dict[str, float]:
        pace.link = link
        stats = take_turns(ways, CallTimer(), Rounds(rounds))
        return {way: own.median for way, own in stats.items()}

    with pace.held():
        fastest = min(medians(None).values())
        pace.link, pace.bytes = None, 0
        own = x.clone().requires_grad_()
        layer_of(1)(own).backward(grad)
        given = torch.tensor([fastest, pace.bytes], dtype=torch.float64)  # of rank 0, so that both have the same link
        dist.broadcast(given, 0)
        computation, size = given.tolist()
        found = [medians(SimulatedLink(size / (share * computation))) for share in shares]
    return computation, int(size), {way: [own[way] for own in found] for way in ways}
