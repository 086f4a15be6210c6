"""The norm of gradients whose parameters are on several meshes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all gradients over all ranks of their meshes, a plain fp32 scalar.

    torch adds up norms of DTensors on one mesh; experts have another one than the rest of a model.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(mesh_of(gradient), []).append(gradient)
    norms = [_whole(torch.nn.utils.get_total_norm(some)) for some in by_mesh.values()]
    if len(norms) == 1:
        return norms[0]
    return torch.stack([norm.to(norms[0].device) for norm in norms]).norm() if norms else torch.zeros(())


def mesh_of(tensor: Tensor) -> Any:
    """The mesh of a DTensor; ``None`` for a plain tensor."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _whole(norm: Tensor) -> Tensor:
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(torch.float32)
