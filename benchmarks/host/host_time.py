"""The host's time for a call of an op on a GPU, forward and backward, without one: ``driver_stand_in.py``.

    python -m benchmarks host_time [OP ...] [--links 8] [--rounds 300] [--device cuda] [--output FOLDER]

A chain of calls, each of what the one before returned, with parameters of its own, and one backward through all: the
time of that divided by the number of calls is what a call costs in a model. Beside it one call with a backward of its
own, of which torch's ``backward()`` takes 10 us by itself. "nothing" is an autograd function in Python that only passes
on its input. Minimum and median of all rounds; tensors are tiny, so that neither pages nor kernels count.

With ``--device cuda`` the same on a GPU, which is waited for before each round, not after.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.harness import options, results
from benchmarks.harness.environment import Environment, describe
from benchmarks.harness.timing import HostTimer, Rounds, take_turns
from parallel_ops import (
    bias_dropout_add,
    bias_gelu,
    flash_attention,
    layer_norm,
    rms_norm,
    rotary_embedding,
    silu_mul,
)

# Tokens and columns; heads and their dimensions. Small, but with the launches of large ones.
_TOKENS, _COLS, _HEADS, _DIMS = 16, 512, 4, 128
# A function of what comes from the link before, and the leaves beside it.
Link = tuple[Callable[[Tensor], Tensor], list[Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Environment):
    """Microseconds of the host a call, forward and backward.

    Attributes:
        launches: Kernels, forward and backward.
        driver_calls: ``"stand-in"`` where nothing was launched.
        load: Processes that ran on the machine before.
    """

    op: str
    chain_min_us: float
    chain_median_us: float
    forward_min_us: float
    forward_median_us: float
    alone_min_us: float
    alone_median_us: float
    launches: int | None
    driver_calls: str
    load: float

    @property
    def key(self) -> tuple[str, ...]:
        return self.op, self.driver_calls


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _leaf(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_()


def _attention(device: torch.device, **options: Any) -> Link:
    k, v = (_leaf(_TOKENS, 1, _HEADS, _DIMS, device=device) for _ in range(2))
    return lambda q: flash_attention(q, k, v, **options), [k, v]


def _with(op: Callable[..., Tensor], *shapes: tuple[int, ...], device: torch.device, **options: Any) -> Link:
    leaves = [_leaf(*shape, device=device) for shape in shapes]
    return lambda x: op(x, *leaves, **options), leaves


def _rotary(device: torch.device) -> Link:
    cos, sin = (torch.randn(_TOKENS, _DIMS // 2, device=device) for _ in range(2))
    return lambda x: rotary_embedding(x, cos, sin), []


def _documents(device: torch.device) -> Link:
    edges = torch.tensor([0, 5, _TOKENS], dtype=torch.int32, device=device)
    return _attention(device, backend="triton", cu_seqlens=edges)


# Makes a link of a chain.
OPS: dict[str, Callable[[torch.device], Link]] = {
    "nothing": lambda device: (_Nothing.apply, []),
    "rms_norm": lambda device: _with(rms_norm, (_COLS,), device=device),
    "layer_norm": lambda device: _with(layer_norm, (_COLS,), (_COLS,), device=device),
    "bias_gelu": lambda device: _with(bias_gelu, (_COLS,), device=device),
    "silu_mul": lambda device: _with(silu_mul, (_TOKENS, _COLS), device=device),
    "bias_dropout_add": lambda device: _with(
        bias_dropout_add, (_COLS,), (_TOKENS, _COLS), device=device, dropout_p=0.1, dropout_seed=7
    ),
    "rotary_embedding": _rotary,
    "flash_attention": lambda device: _attention(device, backend="triton"),
    "flash_attention, auto": _attention,
    "flash_attention, documents": _documents,
}


def _shape(op: str) -> tuple[int, ...]:
    by_heads = op.startswith(("flash", "rotary"))
    return (_TOKENS, 1, _HEADS, _DIMS) if by_heads else (_TOKENS, _COLS)


def _chain(links: list[Link], x: Tensor, grad: Tensor | None) -> None:
    """Forward through all, and backward if there is a gradient."""
    y = x
    for call, leaves in links:
        for leaf in leaves:
            leaf.grad = None
        y = call(y)
    if grad is not None:
        x.grad = None
        y.backward(grad)


def _times(call: Callable[[], None], rounds: int, calls: int, device: torch.device) -> tuple[float, float]:
    """Minimum and median of microseconds a call."""
    for _ in range(5):
        call()
    stats = take_turns({"": call}, HostTimer(device), Rounds(rounds))[""]
    return 1e6 * stats.fastest / calls, 1e6 * stats.median / calls


def measure(op: str, links: int, rounds: int, device: torch.device, launched: Callable[[], int] | None) -> Row:
    """The row of an op. ``launched``: returns the number of kernels that the stand-in has been given."""
    x = _leaf(*_shape(op), device=device)
    grad = torch.randn_like(x).detach()
    every = [OPS[op](device) for _ in range(links)]
    load = os.getloadavg()[0]
    chain = _times(functools.partial(_chain, every, x, grad), rounds, links, device)
    forward = _times(functools.partial(_chain, every, x, None), rounds, links, device)
    one = functools.partial(_chain, every[:1], x, grad)
    alone = _times(one, rounds * links, 1, device)
    launches = None
    if launched is not None:
        before = launched()
        one()
        launches = launched() - before
    return Row(
        op=op, chain_min_us=chain[0], chain_median_us=chain[1], forward_min_us=forward[0],
        forward_median_us=forward[1], alone_min_us=alone[0], alone_median_us=alone[1], launches=launches,
        driver_calls="CUDA" if launched is None else "stand-in", load=load, **vars(describe(device)),
    )  # fmt: skip


def main(
    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="The ops; all by default.")] = None,
    links: Annotated[int, typer.Option(min=1, help="Calls of a chain.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of a chain.")] = 300,
    device: Annotated[str, typer.Option(help="cpu, with a stand-in for the driver, or cuda.")] = "cpu",
    output: Annotated[Path | None, typer.Option(help="Folder for the CSV file; none without it.")] = None,
) -> None:
    """Host time of a call on a GPU."""
    options.check("op", ops, OPS)
    device = options.chosen_device(device)
    if output is not None:
        options.writable("--output", output)
    torch.set_num_threads(1)
    run = functools.partial(measure, links=links, rounds=rounds, device=torch.device(device))
    if device == "cuda":
        rows = [run(op, launched=None) for op in ops or OPS]
    else:
        from benchmarks.host import driver_stand_in

        with driver_stand_in.active() as launched:
            rows = [run(op, launched=launched) for op in ops or OPS]
    caption = "microseconds a call, minimum and median"
    table = options.table("", "in a chain", "its forward", "alone", "launches", "load", caption=caption)
    for row in rows:
        table.add_row(
            row.op, f"{row.chain_min_us:.1f} {row.chain_median_us:.1f}",
            f"{row.forward_min_us:.1f} {row.forward_median_us:.1f}",
            f"{row.alone_min_us:.1f} {row.alone_median_us:.1f}",
            "" if row.launches is None else str(row.launches), f"{row.load:.1f}",
        )  # fmt: skip
    options.console().print(table)
    if output is not None:
        results.merge(output / f"{rows[0].device}-host.csv", rows)


app = options.single(main)
