"""All-gathers of rows in float8: the bits of rows gathered in 16 bits, for half the bytes."""

import pytest
import torch

from parallel_ops.ops.float8_recipes import RECIPES
from support.parallelism import parallel_linear as on_rank
from support.ranks.distributed import ranks

SCALES = {"fp8_rowwise": 4, "fp8_blockwise": 4 * 2, "mxfp8": 8}  # bytes a row of 256


@pytest.mark.parametrize("recipe", RECIPES)
def test_half_the_bytes_and_the_same_bits(recipe):
    """Where blocks divide the rows of every rank; elsewhere rows travel in 16 bits."""
    block = max(RECIPES[recipe].block, 16)
    for sizes, deferred in (([block // 2] * 2, False), ([block, block // 2], True), ([3, 0], False), ([20, 5], True)):
        fits = not any(2 * size % max(1, RECIPES[recipe].block) for size in sizes)
        for rank, found in enumerate(ranks(2).run(on_rank.float8_gathers, recipe, sizes, deferred)):
            (_, plain), (wanted, once), (got, sent) = (found[way] for way in ("bf16", "16 bits", "float8"))
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            assert not any(t.isnan().any() for t in got)
            rows = 2 * max(sizes)  # uneven ones travel padded to the largest
            assert (once == rows * 256 * 2 and plain == 2 * rows * 256 * 2) or len(set(sizes)) > 1
            if not fits:
                assert sent == once
                continue
            # By row columns have a scale for all ranks' rows, of which each sends its largest values in fp32.
            columns = 4 * 256 if recipe == "fp8_rowwise" else rows * SCALES[recipe]
            assert sent == rows * (256 + SCALES[recipe]) + rows * 256 + columns
            if len(set(sizes)) == 1:
                assert sent < (0.6 if recipe == "fp8_rowwise" else 0.52) * plain, rank
