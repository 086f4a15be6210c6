"""Saving of a model that is sharded over ranks as a Hugging Face folder, ``config.json`` and safetensors.

Tensors are gathered one at a time, and global rank 0 writes them. An error of writing is broadcast at the end, since
the other ranks take part in the gathers until then.
"""

import collections
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from parallel_ops._internal.distributed.shards import local_box
from parallel_ops.models.config import TransformerConfig
from parallel_ops.models.huggingface.family import TensorSlice
from parallel_ops.models.huggingface.streaming import Folder, check_free


def save(
    folder: Path, config: TransformerConfig, loaded: Mapping[str, Any], parameters: Mapping[str, Tensor], *,
    dtype: torch.dtype | None, file_bytes: int,
) -> None:  # fmt: skip
    """Writes all parameters of a model; see ``PretrainedModel.save_pretrained``."""
    shapes = {name: t.shape for name, t in parameters.items()}
    dtypes = {name: dtype or t.dtype for name, t in parameters.items()}
    content = Folder(config, loaded, shapes, dtypes, file_bytes)
    mesh, rank = _mesh_of(parameters.values()), dist.get_rank() if dist.is_initialized() else 0
    if rank != 0 and (mesh is None or 0 not in mesh.mesh):
        return  # another replica is saved
    _raise_on_all(mesh, _error_of(lambda: check_free(folder)) if rank == 0 else None)
    gathered = content.pieces(lambda piece, name: _whole(piece, parameters[name]))
    error = _error_of(lambda: content.write(folder, gathered)) if rank == 0 else None
    collections.deque(gathered, maxlen=0)  # the other ranks, and rank 0 after an error; holds none meanwhile
    _raise_on_all(mesh, error)


def _error_of(step: Callable[[], None]) -> Exception | None:
    try:
        step()
    except Exception as error:
        return error
    return None


def _whole(piece: TensorSlice, t: Tensor) -> Tensor:
    """A piece of a parameter; of a DTensor on all ranks of its mesh."""
    if not isinstance(t, DTensor):
        return t[piece.place]
    if t.dim() < 3:
        return t.full_tensor()
    # An expert at a time: all of a layer may be more than a rank can hold.
    out = torch.zeros([part.stop - part.start for part in piece.place], dtype=t.dtype, device=t.to_local().device)
    starts, sizes = local_box(t)
    own = [slice(max(a, p.start), min(a + n, p.stop)) for a, n, p in zip(starts, sizes, piece.place, strict=True)]
    copies = [dim for dim, placement in enumerate(t.placements) if isinstance(placement, Replicate)]
    if all(part.start < part.stop for part in own) and all(t.device_mesh.get_local_rank(dim) == 0 for dim in copies):
        local = t.to_local()[tuple(slice(o.start - a, o.stop - a) for o, a in zip(own, starts, strict=True))]
        out[tuple(slice(o.start - p.start, o.stop - p.start) for o, p in zip(own, piece.place, strict=True))] = local
    for dim in range(t.device_mesh.ndim):
        dist.all_reduce(out, group=t.device_mesh.get_group(dim))
    return out


def _mesh_of(parameters: Any) -> DeviceMesh | None:
    """A mesh over which the model is sharded; ``None`` on one rank. Experts may have another one of the same ranks."""
    meshes = list(dict.fromkeys(t.device_mesh for t in parameters if isinstance(t, DTensor)))
    if len({tuple(mesh.mesh.flatten().sort().values.tolist()) for mesh in meshes}) > 1:
        raise ValueError(f"save_pretrained: parameters must be on the same ranks, got {', '.join(map(str, meshes))}")
    return next(iter(meshes), None)


def _raise_on_all(mesh: DeviceMesh | None, error: Exception | None) -> None:
    """Raises RuntimeError on every rank of the mesh if global rank 0 has failed."""
    box = [None if error is None else f"{type(error).__name__}: {error}"]
    if mesh is not None:
        (place,) = (mesh.mesh == 0).nonzero().tolist()
        for dim, source in enumerate(place):
            dist.broadcast_object_list(box, group=mesh.get_group(dim), group_src=source)
    if box[0] is not None:
        raise RuntimeError(f"save_pretrained: {box[0]}") from error
