"""Saving of a model that is sharded over ranks as a Hugging Face folder, ``config.json`` and safetensors.

Tensors are gathered one at a time. Global rank 0 holds the tensors of one file in host memory, writes into a temporary
folder beside the target, and renames it when it is complete. An error of writing is broadcast at the end, since the
other ranks take part in the gathers until then.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from parallel_ops._internal.distributed.shards import local_box
from parallel_ops.layers.lora import is_adapter
from parallel_ops.models.huggingface.config_json import family_of, options_of
from parallel_ops.models.huggingface.families import TensorSlice
from parallel_ops.models.huggingface.loading import (
    CONFIG,
    INDEX,
    SINGLE,
    Loadable,
    parameters_of,
    safetensors,
    some,
)


def save(model: Loadable, folder: Path, *, dtype: torch.dtype | None, file_bytes: int) -> None:
    """See ``PretrainedModel.save_pretrained``."""
    if any(is_adapter(name) for name in model.state_dict()):
        raise ValueError("save_pretrained: the model has adapters; write them with models.lora.save_adapters")
    parameters = parameters_of(model)
    if dtype not in (None, torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"save_pretrained: dtype must be float64, float32, float16 or bfloat16, got {dtype}")
    if absent := model.global_shapes(model.config).keys() - parameters.keys():
        raise ValueError(f"save_pretrained: the whole model is needed, and {some(absent)} is not on this rank")
    options = options_of(model.config, model.loaded_options)
    options["torch_dtype"] = str(dtype or parameters["norm.weight"].dtype).removeprefix("torch.")
    mesh, rank = _mesh_of(parameters.values()), dist.get_rank() if dist.is_initialized() else 0
    if rank != 0 and (mesh is None or 0 not in mesh.mesh):
        return  # another replica is saved
    family = family_of(options)
    tensors: dict[str, list[tuple[TensorSlice, Tensor]]] = {}  # by name in the files; blocks in order
    for name, t in parameters.items():
        for piece in family.pieces(name, t.shape):
            tensors.setdefault(piece.stored.name, []).append((piece, t))
    copies = family.copies_in(model.config)
    for copy, name in copies.items():
        tensors[copy] = [(family.pieces(name, parameters[name].shape)[0], parameters[name])]
    for blocks in tensors.values():
        blocks.sort(key=lambda block: block[0].stored.part)
    sizes = {
        name: sum(_numel(piece) * (dtype or t.dtype).itemsize for piece, t in blocks)
        for name, blocks in tensors.items()
    }
    files = split_files(sizes, file_bytes)
    writer = _Writer(folder) if rank == 0 else None
    _raise_on_all(mesh, writer)
    for file, names in files.items():
        whole = {name: joined(tensors[name], dtype, keep=rank == 0) for name in names}
        whole |= {name: whole[name].clone() for name in copies.keys() & whole.keys()}  # files share no memory
        if writer is not None:
            writer.do(writer.write_tensors, file, whole)
    if writer is not None:
        writer.do(writer.finish, options, files, sum(sizes.values()))
    _raise_on_all(mesh, writer)


class _Writer:
    """Writes a folder on one rank. After the first error, which it keeps, it does nothing more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.part = self.folder.with_name(f".{self.folder.name}.part")
        self.error: Exception | None = None
        self.do(self._start)

    def do(self, step: Callable[..., None], *args: Any) -> None:
        if self.error is not None:
            return
        try:
            step(*args)
        except Exception as error:
            self.error = error
            shutil.rmtree(self.part, ignore_errors=True)

    def _start(self) -> None:
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise FileExistsError(f"{self.folder} exists and is not an empty folder")
        shutil.rmtree(self.part, ignore_errors=True)  # left by a process that was killed
        self.part.mkdir(parents=True)

    def write_tensors(self, file: str, tensors: dict[str, Tensor]) -> None:
        safetensors().torch.save_file(tensors, self.part / file, metadata={"format": "pt"})

    def finish(self, options: Mapping[str, Any], files: Mapping[str, list[str]], total: int) -> None:
        if len(files) > 1:
            places = {name: file for file, names in files.items() for name in names}
            self._write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": places})
        self._write_json(CONFIG, options)
        os.replace(self.part, self.folder)

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        (self.part / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _numel(piece: TensorSlice) -> int:
    return math.prod(part.stop - part.start for part in piece.place)


def joined(blocks: list[tuple[TensorSlice, Tensor]], dtype: torch.dtype | None, *, keep: bool) -> Tensor:
    """The pieces of parameters that are one tensor in the files, in the files' layout and in host memory.

    Args:
        dtype: ``None`` for that of the parameters. keep: Otherwise the result is empty.
    """
    whole = []
    for piece, t in blocks:
        full = (_whole(piece, t) if isinstance(t, DTensor) else t[piece.place]).detach()
        if piece.stored.stacked:
            full = _in_stack(piece, full)
        elif t.dim() > 2:
            full = full.flatten(0, -2)
        whole.append(full.to("cpu", dtype) if keep else full.new_empty(0))
    rows, stored = whole[0] if len(whole) == 1 else torch.cat(whole), blocks[0][0].stored
    return (rows.t() if stored.transposed and not stored.stacked else rows).contiguous()


def _in_stack(piece: TensorSlice, full: Tensor) -> Tensor:
    """Parameters of experts, ``[n, ...]``, in the layout of a file that stacks them."""
    if piece.stored.interleaved:
        full = full.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return full.transpose(1, 2) if piece.stored.transposed else full


def _whole(piece: TensorSlice, t: DTensor) -> Tensor:
    """A piece of a DTensor, on all ranks of its mesh."""
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


def split_files(sizes: Mapping[str, int], file_bytes: int) -> dict[str, list[str]]:
    """The tensors of each file, in order. A file exceeds ``file_bytes`` only if it holds a single tensor."""
    files: list[list[str]] = [[]]
    room = file_bytes
    for name, size in sizes.items():
        if size > room and files[-1]:
            files.append([])
            room = file_bytes
        files[-1].append(name)
        room -= size
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files, 1)}


def _mesh_of(parameters: Any) -> DeviceMesh | None:
    """A mesh over which the model is sharded; ``None`` on one rank. Experts may have another one of the same ranks."""
    meshes = list(dict.fromkeys(t.device_mesh for t in parameters if isinstance(t, DTensor)))
    if len({tuple(mesh.mesh.flatten().sort().values.tolist()) for mesh in meshes}) > 1:
        raise ValueError(f"save_pretrained: parameters must be on the same ranks, got {', '.join(map(str, meshes))}")
    return next(iter(meshes), None)


def _raise_on_all(mesh: DeviceMesh | None, writer: _Writer | None) -> None:
    """Raises RuntimeError on every rank of the mesh if global rank 0 has failed."""
    error = None if writer is None else writer.error
    box = [None if error is None else f"{type(error).__name__}: {error}"]
    if mesh is not None:
        (place,) = (mesh.mesh == 0).nonzero().tolist()
        for dim, source in enumerate(place):
            dist.broadcast_object_list(box, group=mesh.get_group(dim), group_src=source)
    if box[0] is not None:
        raise RuntimeError(f"save_pretrained: {box[0]}") from error
