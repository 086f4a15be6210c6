"""What each rank does in the tests of the mesh."""

import itertools
import math
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallel_ops import ParallelMesh

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
NAMES = (*DIMENSIONS, "dp", "fsdp", "loss", "ep", "efsdp")


def layouts(world: int) -> list[dict[str, int]]:
    """Every mesh of this many ranks; of those that share experts too, one alone without."""
    factors = [n for n in range(1, world + 1) if world % n == 0]
    found = []
    for sizes in itertools.product(factors, repeat=5):
        if math.prod(sizes) == world:
            experts = [ep for ep in factors if math.prod(sizes[2:]) % ep == 0]
            both = sizes == (1, 1, world // 2, 1, 2)
            found += [{**dict(zip(DIMENSIONS, sizes, strict=True)), "ep": e} for e in experts[not both :] or experts]
    return found


def described(rank: int, layouts: list[dict[str, int]]) -> list[dict[str, Any]]:
    """For each layout name -> (size, rank, ranks of the mesh or None, ranks of the group or None), and the root's."""
    results = []
    for sizes in layouts:
        before = set(dist.distributed_c10d._world.pg_map)
        mesh = ParallelMesh(**sizes)
        result: dict[str, Any] = {}
        for name in NAMES:
            part, group = mesh[name], mesh.group(name)
            members = None if group is None else dist.get_process_group_ranks(group)
            result[name] = (mesh.size(name), mesh.rank(name), None if part is None else part.mesh.tolist(), members)
        try:
            hybrid = mesh["dp_replicate", "fsdp"]
            result["hybrid"] = None if hybrid is None else (hybrid.mesh_dim_names, hybrid.mesh.tolist())
        except ValueError as error:
            result["hybrid"] = str(error)
        result["root"] = (mesh.root.mesh_dim_names, tuple(mesh.root.shape))
        result["formed"] = [g.size() for g in dist.distributed_c10d._world.pg_map if g not in before]
        results.append(result)
        # Each has threads that wake up many times a second, in processes that live as long as the tests.
        for group in set(dist.distributed_c10d._world.pg_map) - before:
            dist.destroy_process_group(group)
    return results


def timeouts(rank: int, timeout: timedelta) -> dict[str, timedelta]:
    """Of the groups of a mesh that is given one, by name."""
    before = set(dist.distributed_c10d._world.pg_map)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # torch's, about calls of names that it has changed
        mesh = ParallelMesh(dp_shard=2, tp=2, timeout=timeout)
    groups = {name: mesh.group(name) for name in NAMES}
    cpu = torch.device("cpu")
    found = {name: group._get_backend(cpu).options._timeout for name, group in groups.items() if group is not None}
    for group in set(dist.distributed_c10d._world.pg_map) - before:
        dist.destroy_process_group(group)
    return found


def closed(rank: int) -> tuple[list[str], list[str]]:
    """The groups of a mesh as they were made, and as they are destroyed."""
    mesh = ParallelMesh(dp_replicate=2, dp_shard=2, tp=2, ep=2)
    made = [str(name) for name in dist.distributed_c10d._world.pg_names.values() if name != dist.group.WORLD.group_name]
    of_mesh, ended, destroy = (
        {mesh.group(name).group_name for name in NAMES if mesh.size(name) > 1},
        [],
        dist.destroy_process_group,
    )

    def noted(group: dist.ProcessGroup) -> None:
        ended.append(str(group.group_name))
        destroy(group)

    dist.destroy_process_group = noted
    try:
        mesh.close()
    finally:
        dist.destroy_process_group = destroy
    return [name for name in made if name in of_mesh], ended
