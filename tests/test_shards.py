"""The part of a tensor that each rank of a mesh holds, for any sizes and order of cuts, without processes."""

import itertools
import math
import random

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from parallel_ops._internal.shards import shard_box

LARGEST = 600
MESHES = [
    sizes
    for dimensions in (2, 3)
    for sizes in itertools.product(range(1, 33), repeat=dimensions)
    if math.prod(sizes) <= 64 and sorted(sizes)[-2] > 1
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


def test_ranks_hold_what_one_cut_after_the_other_leaves_them(trials):
    """Some of the sizes from 1 to 600 on meshes of up to 64 ranks; with ``--trials 0`` all of them, half an hour."""
    cases = [
        (mesh, order)
        for mesh in MESHES
        for count in range(1, len(mesh) + 1)
        for order in itertools.permutations(range(len(mesh)), count)
    ]
    draw = random.Random(0)
    for mesh, order in cases if trials == 0 else draw.choices(cases, k=trials or 300):
        sizes = range(1, LARGEST + 1) if trials == 0 else [draw.randint(1, LARGEST)]
        placements = placements_of(order, mesh)
        for size in sizes:
            parts = {(): range(size)}
            for at in order:
                parts = {(*key, n): p for key, rows in parts.items() for n, p in enumerate(cut(rows, mesh[at]))}
            assert sorted(itertools.chain(*parts.values())) == list(range(size))
            for coordinate in itertools.product(*map(range, mesh)):
                rows = parts[tuple(coordinate[at] for at in order)]
                want = (rows.start if rows else size,), (len(rows),)
                assert shard_box((size,), mesh, coordinate, placements) == want, (size, mesh, order, coordinate)


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
