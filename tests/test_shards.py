"""The part of a tensor that each rank of a mesh holds, for any sizes and order of cuts, without processes."""

import itertools
import math
import random

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from parallel_ops._internal.distributed.shards import cuts_of, shard_box

LARGEST = 600
# One to three mesh dimensions, at most 64 ranks.
MESHES = [
    sizes
    for dimensions in (1, 2, 3)
    for sizes in itertools.product(range(2, 65), repeat=dimensions)
    if math.prod(sizes) <= 64
]


def placements_of(order, mesh):
    """Placements of a vector that mesh dimensions cut in this order, as FSDP2 and DTensor write it."""
    placements = [Replicate()] * len(mesh)
    for number, at in enumerate(order):
        parts = math.prod(mesh[other] for other in order[:number] if other > at)
        placements[at] = _StridedShard(0, split_factor=parts) if parts > 1 else Shard(0)
    return placements


def cut(rows, parts):
    """``torch.chunk`` of a range, with empty ones at the end: what FSDP2 and DTensor's ``Shard`` do."""
    length = -(-len(rows) // parts)
    return [rows[part * length : (part + 1) * length] for part in range(parts)]


@pytest.mark.parametrize("size", [1, 2, 5, 7, 64, 257])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_the_reference_cuts_as_torch_does(size, parts):
    found = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)]
    assert [list(part) for part in cut(range(size), parts)] == found + [[]] * (parts - len(found))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_placements_have_the_order_of_the_cuts(dimensions):
    orders = [o for count in range(dimensions + 1) for o in itertools.permutations(range(dimensions), count)]
    for mesh in MESHES:
        if len(mesh) == dimensions:
            for order in orders:
                assert cuts_of(0, mesh, placements_of(order, mesh)) == list(order), mesh
                assert cuts_of(1, mesh, placements_of(order, mesh)) == []


def test_ranks_hold_what_one_cut_after_the_other_leaves_them(trials):
    """Sizes from 1 to 600, cut for any mesh of up to 64 ranks in any order; all with ``--trials 0``, half a minute."""
    every = itertools.product(MESHES, range(1, LARGEST + 1))
    draw = random.Random(0)
    for mesh, size in every if trials == 0 else draw.choices(list(every), k=trials or 1000):
        parts = {(): range(size)}
        for count in mesh:
            parts = {(*key, n): part for key, rows in parts.items() for n, part in enumerate(cut(rows, count))}
        assert list(itertools.chain(*parts.values())) == list(range(size))
        placements = [Shard(0)] * len(mesh)
        for coordinate, rows in parts.items():
            want = (rows.start if rows else size,), (len(rows),)
            assert shard_box((size,), mesh, coordinate, placements) == want, (size, mesh, coordinate)


def test_dimensions_are_cut_by_themselves():
    mesh = (4, 3, 2)
    placements = [_StridedShard(1, split_factor=2), Shard(0), Shard(1)]
    found = {c: shard_box((7, 33), mesh, c, placements) for c in itertools.product(*map(range, mesh))}
    held = torch.zeros(7, 33, dtype=torch.int64)
    for (top, left), (rows, columns) in found.values():
        held[top : top + rows, left : left + columns] += 1
    assert held.eq(1).all()
    assert found[3, 2, 0] == ((6, 15), (1, 2)) and found[3, 2, 1] == ((6, 29), (1, 4))


def test_placements_that_no_order_of_cuts_gives():
    assert shard_box((12,), (2, 2), (0, 0), [_StridedShard(0, split_factor=3), Shard(0)]) is None
    assert shard_box((12,), (2,), (0,), [_StridedShard(0, split_factor=2)]) is None
