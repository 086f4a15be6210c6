"""ParallelMesh: the layout of ranks, the meshes by name, and what it refuses."""

import itertools
from datetime import timedelta

import pytest

from parallel_ops import ParallelMesh
from support.ranks import mesh
from support.ranks.distributed import Raised, ranks

PARTS = {
    **{name: (name,) for name in mesh.DIMENSIONS},
    "dp": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}


def line(rank: int, sizes: dict[str, int], parts: tuple[str, ...]) -> list[int]:
    """The ranks that differ from ``rank`` in these dimensions alone, the innermost dimension fastest."""
    strides, stride = {}, 1
    for name in reversed(mesh.DIMENSIONS):
        strides[name], stride = stride, stride * sizes[name]
    base = rank - sum(rank // strides[p] % sizes[p] * strides[p] for p in parts)
    steps = itertools.product(*([i * strides[p] for i in range(sizes[p])] for p in parts))
    return [base + sum(step) for step in steps]


def test_meshes_follow_the_layout():
    layouts = mesh.layouts(4)
    for rank, results in enumerate(ranks(4).run(mesh.described, layouts)):
        for sizes, result in zip(layouts, results, strict=True):
            expected = {name: line(rank, sizes, parts) for name, parts in PARTS.items()}
            folded = line(rank, sizes, ("dp_shard", "cp", "tp"))
            at, ep = folded.index(rank), sizes["ep"]
            if ep > 1:
                expected["ep"] = folded[at // ep * ep : at // ep * ep + ep]
                expected["efsdp"] = folded[at % ep :: ep]
            for name, members in expected.items():
                whole = None if len(members) == 1 else members
                assert result[name] == (len(members), members.index(rank), whole, whole), (sizes, name)
            present = tuple(name for name in mesh.DIMENSIONS if sizes[name] > 1)
            assert result["root"] == (present, tuple(sizes[name] for name in present))
            assert 1 not in result["formed"] or ep in (2, 4)  # a dimension of one rank costs nothing
            replicas, shards = line(rank, sizes, ("dp_replicate",)), expected["fsdp"]
            if len(replicas) == 1:
                assert result["hybrid"] == (None if len(shards) == 1 else (result["hybrid"][0], shards))
            elif len(shards) == 1:
                assert "give mesh['dp_replicate'] to replicate" in result["hybrid"]
            else:
                names, rows = result["hybrid"]
                assert names[0] == "dp_replicate" and len(names) == 2
                assert rows == [line(r, sizes, PARTS["fsdp"]) for r in replicas]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 3}, "pp=1 * dp_replicate=1 * dp_shard=1 * cp=1 * tp=3 is 3, but the default process group has 2 ranks"),
        ({}, "is 1, but the default process group has 2 ranks"),
        ({"dp_shard": 2, "ep": 4}, "ep=4 must divide dp_shard * cp * tp = 2"),
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"tp": 2.0}, "tp must be an int, got float"),
        ({"tp": 2, "device_type": "tpu"}, "device_type must be 'cpu' or 'cuda', got 'tpu'"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    for outcome in ranks(2).outcomes(mesh.described, [sizes]):
        assert isinstance(outcome, Raised)
        assert outcome.type in ("ValueError", "TypeError")
        assert message in outcome.message


def test_one_rank_without_a_process_group():
    alone = ParallelMesh()
    assert alone["tp"] is None and alone.group("tp") is None and alone["dp_replicate", "fsdp"] is None
    assert (alone.size("loss"), alone.rank("ep")) == (1, 0)
    assert repr(alone) == "ParallelMesh(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1, ep=1)"
    with pytest.raises(RuntimeError, match="init_process_group"):
        _ = alone.root
    with pytest.raises(ValueError, match="no dimension 'sp'; the dimensions are pp, dp_replicate, dp_shard, cp, tp"):
        alone.group("sp")
    with pytest.raises(ValueError, match="tp=2 is 2, but there is no default process group"):
        ParallelMesh(tp=2)


def test_the_groups_of_a_mesh_have_its_timeout():
    """torch gives them its default, also where that of the default process group is another."""
    timeout = timedelta(seconds=77)
    for found in ranks(4).run(mesh.timeouts, timeout):
        assert found == dict.fromkeys(("dp_shard", "tp", "dp", "fsdp", "loss"), timeout)


def test_the_groups_of_a_mesh_end_in_one_order():
    """Ranks of a node end a communicator of NCCL together."""
    for made, ended in ranks(8).run(mesh.closed):
        assert len(ended) > 5
        assert ended == made
