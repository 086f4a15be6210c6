"""What is wrong with the input of one rank is an error on all of them, at once, that names rank and argument."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.parallelism.layers import HIDDEN, VOCAB, angles, build
from support.ranks.distributed import COLLECTIVE_SECONDS, ranks

BLOCKS = ["layer", "llama", "attention", "gelu", "swiglu"]
SHAPES = {"layer": "[s, b, 16]", "llama": "[s, b, 16]", "attention": "[s, b, 16]"}
NAMES = {
    "layer": "ParallelTransformerLayer",
    "llama": "ParallelTransformerLayer",
    "attention": "ParallelSelfAttention",
    "gelu": "ParallelMLP",
    "swiglu": "ParallelMLP",
    "row": "RowParallelLinear",
    "column": "ColumnParallelLinear",
    "embedding": "VocabParallelEmbedding",
}


def cases(size):
    """(kind, what is wrong, sequence_parallel), what the guilty rank says."""
    kinds = BLOCKS if size == 2 else ["gelu"]  # 3 ranks cannot share 4 heads
    for sequence_parallel in (False, True):
        for kind in kinds:
            form = SHAPES.get(kind, "[s, ..., 16]")
            yield (kind, "width", sequence_parallel), f"{NAMES[kind]}: x must be {form}, got ["
            yield (kind, "dtype", sequence_parallel), f"{NAMES[kind]}: x is torch.float64, but the weight is torch.f"
        if size == 2:
            yield ("row", "width", sequence_parallel), "RowParallelLinear: x must be [s, ..., 8], got [6, 2, 9]"
            yield ("layer", "dimensions", sequence_parallel), "x must be [s, b, 16], got ["
            yield ("llama", "angles", sequence_parallel), "rotary_embedding: cos has 5 rows, but x has 6 positions"
        yield ("embedding", "token", sequence_parallel), "VocabParallelEmbedding: tokens must be from 0 to 29, got 0 to"
        yield ("embedding", "dtype", sequence_parallel), "VocabParallelEmbedding: tokens must be an int64 or int32"
    if size == 2:
        yield ("column", "width", True), "ColumnParallelLinear: x must be [s, ..., 16], got [3, 2, 17]"
        yield ("layer", "sizes", True), "all_gather_linear: sizes must be a sequence of ints, got str"


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


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("guilty", [0, 1])
def test_all_ranks_raise_at_once_and_name_rank_and_argument(size, guilty):
    wanted = list(cases(size))
    outcomes = ranks(size).run(wrong_inputs, [case for case, _ in wanted], guilty)
    for (case, message), *of_ranks in zip(wanted, *outcomes, strict=True):
        for rank, (error, text, seconds) in enumerate(of_ranks):
            assert error in ("ValueError", "TypeError", "IndexError"), (case, rank, text)
            assert message in text, (case, rank, text)
            assert seconds < COLLECTIVE_SECONDS / 5, (case, rank)
            if rank != guilty:
                assert f"rank {guilty} of the group rejected its arguments: " in text, (case, rank, text)


@pytest.mark.parametrize("kind", ["layer", "llama", "embedding", "row"])
def test_without_gradients_the_outputs_are_the_same(kind):
    for sequence_parallel in (False, True):
        for with_grad, *others in ranks(2).run(in_inference, kind, sequence_parallel):
            assert all(torch.equal(with_grad, y) for y in others)
