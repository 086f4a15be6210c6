"""How the ranks of a job are laid out over the kinds of parallelism: names for parts of one root ``DeviceMesh``.

    rank = (((i_pp * dp_replicate + i_dp_replicate) * dp_shard + i_dp_shard) * cp + i_cp) * tp + i_tp

Tensor parallelism is innermost: it communicates most, so its ranks are neighbours, on one node's NVLink. Pipeline
stages are outermost: they communicate least. Replicas of the sharded model come before the shards, so that the
all-gathers of a sharded data-parallel step stay closer together than the all-reduce between replicas. Expert
parallelism has no ranks of its own: it is another view of the ranks that share a pipeline stage and a replica, with
``efsdp * ep`` in the place of ``dp_shard * cp * tp``.

All meshes come from one root, which is what lets FSDP2 shard a parameter that is a DTensor on ``tp`` already. A
dimension of one rank costs nothing: it is not in the root, since torch would form a process group, with its threads,
for it too.
"""

import math
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel_ops._internal.distributed.compat import concatenate_meshes, set_group_timeout
from parallel_ops._internal.distributed.groups import group_device

# From the outermost to the innermost.
_DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# Several dimensions as one.
_FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}
_EXPERTS = ("efsdp", "ep")
_NAMES = (*_DIMENSIONS, *_FLATTENED, *_EXPERTS)


class ParallelMesh:
    """The meshes of a job that trains with several kinds of parallelism at once.

    Args:
        pp: pipeline stages.
        dp_replicate: replicas of the model, whose gradients are all-reduced.
        dp_shard: ranks over which FSDP shards a replica.
        cp: ranks that share a sequence (context parallelism).
        tp: ranks that share each weight (tensor parallelism).
        ep: ranks that share the experts of a layer; must divide ``dp_shard * cp * tp``, into which it folds.
        device_type: ``"cuda"`` or ``"cpu"``; by default what the default process group's backend sends from.
        timeout: of the collectives of all groups of the mesh; by default torch's.

    The product of the first five must be the size of the default process group. Without one (``init_process_group``
    not called) all sizes must be 1. Every rank must construct the mesh, with the same sizes: new groups are formed.

    ``mesh[name]`` is a one-dimensional ``DeviceMesh``, ``mesh[name, name]`` one of several dimensions, such as
    ``mesh["dp_replicate", "fsdp"]`` for hybrid sharding; ``None`` where it would have one rank. The names:

    ================ ==========================================================================
    ``tp``           one weight, one sequence
    ``cp``           one sequence
    ``dp_shard``     shards of one replica's parameters
    ``dp_replicate`` replicas
    ``pp``           one replica, stage by stage
    ``dp``           ``dp_replicate x dp_shard``: the same weights, different data
    ``fsdp``         ``dp_shard x cp``: what ``fully_shard`` shards over
    ``loss``         ``dp_replicate x dp_shard x cp``: the same weights, different tokens, so the loss is its mean
    ``ep``           the experts of one layer, a view over ``dp_shard x cp x tp``
    ``efsdp``        the same experts, different tokens: the rest of that view, where ``ep`` has several ranks
    ================ ==========================================================================

    Raises:
        TypeError: a size that is not an int. ValueError: a size below 1, sizes that do not multiply to the world size,
            or an ``ep`` that does not divide ``dp_shard * cp * tp``.

    Examples:
        >>> from parallel_ops import ParallelMesh
        >>> mesh = ParallelMesh(dp_shard=1, tp=1)  # on 8 ranks, after init_process_group: dp_shard=2, tp=4
        >>> mesh["tp"] is None  # one rank: layers take None
        True
    """

    def __init__(
        self,
        pp: int = 1,
        dp_replicate: int = 1,
        dp_shard: int = 1,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
        *,
        device_type: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        sizes = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
        for name, size in {**sizes, "ep": ep}.items():
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"ParallelMesh: {name} must be an int, got {type(size).__name__}")
            if size < 1:
                raise ValueError(f"ParallelMesh: {name} must be at least 1, got {size}")
        product, experts = math.prod(sizes.values()), dp_shard * cp * tp
        world = dist.get_world_size() if dist.is_initialized() else 1
        if product != world:
            raise ValueError(
                "ParallelMesh: " + " * ".join(f"{n}={s}" for n, s in sizes.items()) + f" is {product}, but "
                + (
                    f"the default process group has {world} ranks"
                    if dist.is_initialized()
                    else "there is no default process group; call torch.distributed.init_process_group first"
                )
            )  # fmt: skip
        if experts % ep:
            raise ValueError(
                f"ParallelMesh: ep={ep} must divide dp_shard * cp * tp = {experts}, into which expert parallelism folds"
            )
        if device_type not in (None, "cpu", "cuda"):
            raise ValueError(f"ParallelMesh: device_type must be 'cpu' or 'cuda', got {device_type!r}")
        self._sizes = {**sizes, **{n: math.prod(sizes[p] for p in parts) for n, parts in _FLATTENED.items()}}
        self._sizes |= {"efsdp": experts // ep, "ep": ep}
        self._root: DeviceMesh | None = None
        self._meshes: dict[str, DeviceMesh] = {}
        self._timeout = timeout
        if dist.is_initialized():
            world_group = dist.group.WORLD
            assert world_group is not None
            # Without a backend, init_process_group takes NCCL for CUDA along even where there is no GPU.
            found = group_device(world_group).type if torch.cuda.is_available() else "cpu"
            self._form(device_type or found)
            if timeout is not None:
                for mesh in self._meshes.values():
                    set_group_timeout(mesh.get_group(), timeout)

    def _form(self, device_type: str) -> None:
        present = tuple(name for name in _DIMENSIONS if self._sizes[name] > 1) or ("tp",)
        sizes = tuple(self._sizes[name] for name in present)
        root = self._root = init_device_mesh(device_type, sizes, mesh_dim_names=present)
        self._meshes = {name: root[name] for name in present}

        def together(name: str, parts: tuple[str, ...]) -> DeviceMesh | None:
            found = tuple(part for part in parts if part in present)
            if len(found) > 1:
                return root[found]._flatten(name)
            return self._meshes[found[0]] if found else None

        for name, parts in _FLATTENED.items():
            mesh = together(name, parts)
            if mesh is not None:
                self._meshes[name] = mesh
        if self._sizes["ep"] > 1:
            experts = together("dp_shard_cp_tp", ("dp_shard", "cp", "tp"))
            assert experts is not None  # ep divides its size
            view = experts._unflatten(0, tuple(self._sizes[name] for name in _EXPERTS), _EXPERTS)
            self._meshes |= {name: view[name] for name in _EXPERTS}
            # Experts know their ranks alone; what shards them over others finds those here.
            self._meshes["ep"].parallel_mesh = self  # type: ignore[attr-defined]

    @property
    def root(self) -> DeviceMesh:
        """The mesh of all ranks: of pp, dp_replicate, dp_shard, cp and tp, those with several ranks, in this order.

        Raises RuntimeError without a default process group.
        """
        if self._root is None:
            raise RuntimeError("ParallelMesh: a DeviceMesh needs torch.distributed.init_process_group")
        return self._root

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh | None:
        """The mesh of this name, or of these names from the outermost in; ``None`` where it has one rank.

        Names of one rank are left out of a mesh of several.

        Raises:
            ValueError: an unknown name, names that share ranks or are out of order, or shards of one rank beside
                replicas of several, which ``fully_shard`` would take for shards.
        """
        wanted = (names,) if isinstance(names, str) else tuple(names)
        several = [name for name in wanted if self.size(name) > 1]
        if not several:
            return None
        if len(wanted) == 1:
            return self._meshes.get(wanted[0])
        covered = [part for name in wanted for part in _FLATTENED.get(name, (name,))]
        if any(part not in _DIMENSIONS for part in covered) or covered != sorted(set(covered), key=_DIMENSIONS.index):
            raise ValueError(
                f"ParallelMesh: {', '.join(wanted)} cannot be dimensions of one mesh; name parts of "
                f"{', '.join(_DIMENSIONS)}, each once and in this order"
            )
        if several == ["dp_replicate"]:
            raise ValueError(
                f"ParallelMesh: of {', '.join(wanted)} only dp_replicate has several ranks; give mesh['dp_replicate'] "
                "to replicate instead of this to fully_shard, which would shard over it"
            )
        if len(several) == 1:
            return self._meshes[several[0]]
        return concatenate_meshes([self._meshes[name] for name in several])

    def close(self) -> None:
        """Destroys the groups of the mesh, but not the default one; all ranks call it, after the last use."""
        # In one order on all ranks: to end a communicator of NCCL is a collective of the ranks of a node.
        for group in dict.fromkeys(mesh.get_group() for mesh in self._meshes.values()):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._meshes, self._root = {}, None

    @property
    def expert_shards(self) -> DeviceMesh | None:
        """The ranks that have the same experts: ``efsdp``, of one rank too, or ``dp_replicate x efsdp``; ``None``
        without ``ep``.

        FSDP2 needs a mesh even where it has nothing to shard: it divides the gradients.
        """
        if self._sizes["ep"] == 1:
            return None
        shards = self._meshes["efsdp"]
        return concatenate_meshes([self._meshes["dp_replicate"], shards]) if self._sizes["dp_replicate"] > 1 else shards

    def group(self, name: str) -> ProcessGroup | None:
        """The process group of this rank in dimension ``name``; ``None`` for one rank, as ops take it."""
        mesh = self[name]
        return None if mesh is None else mesh.get_group()

    @property
    def pipelines(self) -> list[list[int]]:
        """The global ranks of each group ``pp`` of the job, stage by stage."""
        found: list[list[int]] = self.root.mesh.reshape(self._sizes["pp"], -1).t().tolist()
        return found

    def parts(self, name: str) -> dict[int, ProcessGroup | None]:
        """This rank's neighbours along a dimension: groups of aligned ranks, of every power of two that divides it.

        All ranks call it; the groups are made once.
        """
        size, whole = self.size(name), self[name]
        found: dict[int, ProcessGroup | None] = {1: None}
        for own in (2**n for n in range(1, size.bit_length()) if size % 2**n == 0):
            assert whole is not None
            if own < size and f"{name}_of_{own}" not in self._meshes:
                across, inside = f"{name}_across_{own}", f"{name}_of_{own}"
                view = whole._unflatten(0, (size // own, own), (across, inside))
                self._meshes |= {across: view[across], inside: view[inside]}
                if self._timeout is not None:
                    set_group_timeout(view[inside].get_group(), self._timeout)
            found[own] = (whole if own == size else self._meshes[f"{name}_of_{own}"]).get_group()
        return found

    def size(self, name: str) -> int:
        """How many ranks there are along a dimension."""
        if name not in _NAMES:
            raise ValueError(f"ParallelMesh: there is no dimension {name!r}; the dimensions are {', '.join(_NAMES)}")
        return self._sizes[name]

    def rank(self, name: str) -> int:
        """Where this rank stands along a dimension, from 0."""
        mesh = self[name]
        return 0 if mesh is None else mesh.get_local_rank()

    def __repr__(self) -> str:
        return "ParallelMesh(" + ", ".join(f"{n}={self._sizes[n]}" for n in (*_DIMENSIONS, "ep")) + ")"
