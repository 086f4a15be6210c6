"""What each rank does in the tests of the mesh."""

import itertools
import math
from typing import Any

import torch.distributed as dist

from parallel_ops import ParallelMesh

NAMES = ("tp", "cp", "pp", "dp", "ep", "expert_dp", "dp_cp")


def layouts(world: int) -> list[dict[str, int]]:
    """Every mesh of this many ranks."""
    factors = [n for n in range(1, world + 1) if world % n == 0]
    return [
        {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep}
        for pp, dp, cp, tp in itertools.product(factors, repeat=4)
        if math.prod((pp, dp, cp, tp)) == world
        for ep in factors
        if dp % ep == 0
    ]


def described(rank: int, sizes: dict[str, int]) -> dict[str, Any]:
    """name -> (size, rank, ranks by the mesh, ranks of the process group or None), and the DeviceMesh's dimensions."""
    mesh = ParallelMesh(**sizes)
    result: dict[str, Any] = {}
    for name in NAMES:
        group = mesh.group(name)
        members = None if group is None else dist.get_process_group_ranks(group)
        result[name] = (mesh.size(name), mesh.rank(name), mesh.ranks(name), members)
    result["device_mesh"] = (mesh.device_mesh.mesh_dim_names, tuple(mesh.device_mesh.shape))
    return result
