"""How the ranks of a job are laid out over the kinds of parallelism.

    rank = ((i_dp * pp + i_pp) * cp + i_cp) * tp + i_tp

Tensor parallelism is innermost: it talks most, so its ranks are neighbours, on one node's NVLink. Data parallelism is
outermost: it talks least and can wait. Expert parallelism has no ranks of its own; it folds into data parallelism. The
``dp`` replicas are taken ``ep`` at a time: the ranks of such a block hold different experts and each other's tokens go
between them, and the ``dp / ep`` ranks that hold the same experts form ``expert_dp``.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parallel_ops.comm._group import group_device

# From the outermost to the innermost.
_DIMENSIONS = ("dp", "pp", "cp", "tp")
_NAMES = (*_DIMENSIONS, "ep", "expert_dp", "dp_cp")


class ParallelMesh:
    """The process groups of a job that trains with several kinds of parallelism at once.

    Args:
        pp: pipeline stages.
        dp: data-parallel replicas.
        cp: ranks that share a sequence (context parallelism).
        tp: ranks that share each weight (tensor parallelism).
        ep: ranks that share the experts of a layer; must divide ``dp``, into which it folds.
        device_type: ``"cuda"`` or ``"cpu"``; by default what the default process group's backend sends from.

    ``pp * dp * cp * tp`` must be the size of the default process group. Without one (``init_process_group`` not
    called) all sizes must be 1. Every rank must construct the mesh, with the same sizes: new groups are formed.

    Groups are asked for by name:

    ============= ==========================================================================
    ``tp``        one weight, one sequence
    ``cp``        one sequence
    ``pp``        one model replica, stage by stage
    ``dp``        the same weights, different data
    ``dp_cp``     the same weights, different tokens: gradients are reduced over it
    ``ep``        the experts of one layer; part of ``dp``
    ``expert_dp`` the same experts, different data; the rest of ``dp``
    ============= ==========================================================================

    Raises:
        TypeError: a size that is not an int. ValueError: a size below 1, sizes that do not multiply to the world size,
        or an ``ep`` that does not divide ``dp``.
    """

    def __init__(
        self, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, ep: int = 1, *, device_type: str | None = None
    ) -> None:
        sizes = {"dp": dp, "pp": pp, "cp": cp, "tp": tp}
        for name, size in {**sizes, "ep": ep}.items():
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"ParallelMesh: {name} must be an int, got {type(size).__name__}")
            if size < 1:
                raise ValueError(f"ParallelMesh: {name} must be at least 1, got {size}")
        world = dist.get_world_size() if dist.is_initialized() else 1
        if math.prod(sizes.values()) != world:
            raise ValueError(
                f"ParallelMesh: pp={pp} * dp={dp} * cp={cp} * tp={tp} is {math.prod(sizes.values())}, but "
                + (
                    f"the default process group has {world} ranks"
                    if dist.is_initialized()
                    else "there is no default process group; call torch.distributed.init_process_group first"
                )
            )
        if dp % ep:
            raise ValueError(f"ParallelMesh: ep={ep} must divide dp={dp}, since expert parallelism folds into it")
        if device_type not in (None, "cpu", "cuda"):
            raise ValueError(f"ParallelMesh: device_type must be 'cpu' or 'cuda', got {device_type!r}")
        self._sizes = {**sizes, "ep": ep, "expert_dp": dp // ep, "dp_cp": dp * cp}
        self._ranks = torch.arange(world).view(*sizes.values())
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._mesh: DeviceMesh | None = None
        self._groups: dict[str, ProcessGroup | None] = dict.fromkeys(_NAMES)
        if dist.is_initialized():
            self._form_groups(device_type or group_device(_world()).type)

    def _form_groups(self, device_type: str) -> None:
        self._mesh = DeviceMesh(device_type, self._ranks, mesh_dim_names=_DIMENSIONS)
        for name in _DIMENSIONS:
            if self._sizes[name] > 1:
                self._groups[name] = self._mesh.get_group(name)
        for name, (part, whole) in {
            "ep": ("expert_dp", "dp"),
            "expert_dp": ("ep", "dp"),
            "dp_cp": ("cp", "dp"),
        }.items():
            if self._sizes[name] == 1:
                continue
            if self._sizes[part] == 1:
                self._groups[name] = self._groups[whole]
            elif name == "dp_cp" and self._sizes["dp"] == 1:
                self._groups[name] = self._groups["cp"]
            else:
                self._groups[name] = dist.new_subgroups_by_enumeration(self._blocks(name).tolist())[0]

    def _blocks(self, name: str) -> torch.Tensor:
        """The ranks of every group of this name, a group a row."""
        if name in ("ep", "expert_dp"):
            folded = self._ranks.view(self._sizes["expert_dp"], self._sizes["ep"], -1)
            return folded.movedim(1 if name == "ep" else 0, -1).reshape(-1, self._sizes[name])
        if name == "dp_cp":
            return self._ranks.permute(1, 3, 0, 2).reshape(-1, self._sizes[name])
        return self._ranks.movedim(_DIMENSIONS.index(name), -1).reshape(-1, self._sizes[name])

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ``DeviceMesh`` with dimensions ``("dp", "pp", "cp", "tp")``, for DTensor, FSDP2 and checkpoints.

        Raises RuntimeError without a default process group.
        """
        if self._mesh is None:
            raise RuntimeError("ParallelMesh: a DeviceMesh needs torch.distributed.init_process_group")
        return self._mesh

    def group(self, name: str) -> ProcessGroup | None:
        """The group that this rank is in, or ``None`` if it is alone, which is how every op is told the same."""
        return self._groups[_known(name)]

    def size(self, name: str) -> int:
        """How many ranks the group has."""
        return self._sizes[_known(name)]

    def ranks(self, name: str) -> list[int]:
        """The global ranks of this rank's group, in group order."""
        blocks: list[list[int]] = self._blocks(_known(name)).tolist()
        return next(block for block in blocks if self._rank in block)

    def rank(self, name: str) -> int:
        """Where this rank stands in the group, from 0."""
        return self.ranks(name).index(self._rank)

    def __repr__(self) -> str:
        return "ParallelMesh(" + ", ".join(f"{n}={self._sizes[n]}" for n in ("pp", "dp", "cp", "tp", "ep")) + ")"


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _known(name: str) -> str:
    if name not in _NAMES:
        raise ValueError(f"ParallelMesh: there is no group {name!r}; the groups are {', '.join(_NAMES)}")
    return name
