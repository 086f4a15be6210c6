"""What is wrong with the input of one rank is an error on all of them, at once, that names rank and argument."""

import pytest
import torch

from support import layer_failures as on_rank
from support.distributed import COLLECTIVE_SECONDS, ranks

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


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("guilty", [0, 1])
def test_all_ranks_raise_at_once_and_name_rank_and_argument(size, guilty):
    wanted = list(cases(size))
    outcomes = ranks(size).run(on_rank.wrong_inputs, [case for case, _ in wanted], guilty)
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
        for with_grad, *others in ranks(2).run(on_rank.in_inference, kind, sequence_parallel):
            assert all(torch.equal(with_grad, y) for y in others)
