"""Inputs that are wrong on one rank alone, and what every rank then says."""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from support.layers import HIDDEN, VOCAB, angles, build

WIDTHS = {"column": HIDDEN, "grouped": 2 * HIDDEN}
S = 6


def wrong_input(rank: int, kind: str, what: str, sequence_parallel: bool, guilty: int) -> tuple[str, str, float]:
    """(exception, its message, seconds that it took) of a forward whose ``what`` is wrong on rank ``guilty``."""
    module = build(kind, sequence_parallel=sequence_parallel)
    wrong = rank == guilty
    args, sizes = _arguments(kind, sequence_parallel, what if wrong else "nothing")
    dist.barrier()
    started = time.monotonic()
    try:
        module(*args, sizes=sizes)
    except (TypeError, ValueError, IndexError) as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", 0.0


def _arguments(kind: str, sequence_parallel: bool, what: str) -> tuple[tuple[object, ...], object]:
    if kind == "embedding":
        tokens = torch.zeros(S, 2, dtype=torch.float32 if what == "dtype" else torch.int64)
        if what == "token":
            tokens[1, 1] = VOCAB
        return (tokens,), None
    world = dist.get_world_size()
    width = WIDTHS.get(kind, HIDDEN)
    width = width // world if kind == "row" else width
    x: Tensor = torch.randn(S, 2, width + (what == "width"))
    if sequence_parallel and kind != "row":
        x = x.chunk(world)[0]
    if what == "dtype":
        x = x.double()
    if what == "dimensions":
        x = x.flatten(0, 1)
    rotation = angles(S - (what == "angles"), kind)
    sizes = "6" if what == "sizes" else None
    return (x,) if rotation is None else (x, rotation), sizes


def wrong_inputs(rank: int, cases: list[tuple[str, str, bool]], guilty: int) -> list[tuple[str, str, float]]:
    return [wrong_input(rank, *case, guilty) for case in cases]


def in_inference(rank: int, kind: str, sequence_parallel: bool) -> list[Tensor]:
    """Outputs with gradients, without, and in inference mode."""
    module = build(kind, sequence_parallel=sequence_parallel)
    (x, *rest), _ = _arguments(kind, sequence_parallel, "nothing")
    outputs = [module(x, *rest).detach()]
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            outputs.append(module(x, *rest))
    return [y.clone() for y in outputs]
