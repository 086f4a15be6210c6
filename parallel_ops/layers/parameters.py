"""Parameters that a group of ranks holds together: DTensors on the tensor-parallel mesh, plain ones on one rank.

So torch's optimizers, ``clip_grad_norm_``, ``get_state_dict``, checkpoints and FSDP2 work on them as on any parameter.

``to_local``: the ops take plain tensors. ``DTensor.to_local`` costs the host many times as much as an op, so one
autograd function returns the local tensors of a module and makes DTensors of their gradients. Parameters that are whole
on every rank but are applied to this rank's tokens or heads only have partial gradients; it sums these over the ranks,
those of a module in one message. A module must not be larger than what lies between two linears: a backward that is
split into input and weight gradients (torch.distributed.pipelining) walks everything between what one such function
feeds.

``check_input`` and ``propagates_errors``: checks before communication starts, whose errors the other ranks get too.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from parallel_ops._internal.dispatch.checks import check_floating, check_same_device, check_same_dtype
from parallel_ops._internal.distributed.compat import new_dtensor
from parallel_ops._internal.distributed.groups import group_rank
from parallel_ops.comm import copy_to_group, primitives
from parallel_ops.comm.consistency import propagate_errors

P = ParamSpec("P")
R = TypeVar("R")


def empty_parameter(
    shape: Sequence[int],
    placement: Placement,
    mesh: DeviceMesh | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Parameter:
    """An uninitialised parameter of the global ``shape``; this rank holds its shard, cut as ``torch.chunk`` cuts."""
    if mesh is None:
        return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
    if device is None:  # that of the mesh, but for a model without memory: ``with torch.device("meta")``
        device = "meta" if torch.get_default_device().type == "meta" else mesh.device_type
    part = list(shape)
    if isinstance(placement, Shard):
        length = -(-part[placement.dim] // mesh.size())
        start = min(mesh.get_local_rank() * length, part[placement.dim])
        part[placement.dim] = min(length, part[placement.dim] - start)
    stride = torch.empty(shape, device="meta").stride()  # torch cannot derive it from shards of different sizes
    local = torch.empty(part, device=device, dtype=dtype)
    return nn.Parameter(
        DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)
    )


class ShardedModule(nn.Module):
    """A module with parameters over a mesh of one dimension; ``mesh`` is ``None`` where it has one rank."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = check_mesh(type(self).__name__, mesh)
        self.group: ProcessGroup | None = None if self.mesh is None else self.mesh.get_group()  # as ops take it
        self.ranks = 1 if self.mesh is None else self.mesh.size()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedModule":
        """A deep copy over the same mesh and group, which cannot be copied."""
        memo |= {id(shared): shared for shared in (self.mesh, self.group) if shared is not None}
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        return copied

    def extra_repr(self) -> str:
        """The whole shapes of the module's own parameters, and the rank that has a part of them."""
        shapes = [f"{name}={list(p.shape)}" for name, p in self.named_parameters(recurse=False)]
        return ", ".join([*shapes, f"rank={group_rank(self.group)} of {self.ranks}"] if shapes else [])


def check_mesh(layer: str, mesh: DeviceMesh | None) -> DeviceMesh | None:
    """``mesh``, or ``None`` if it has one rank; raises unless it has one dimension."""
    if mesh is None:
        return None
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{layer}: mesh must be None or a torch DeviceMesh of one dimension, such as ParallelMesh(tp=...)['tp'], "
            f"got {type(mesh).__name__}"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"{layer}: mesh must have one dimension, the tensor-parallel one, got {mesh.ndim} ({mesh.mesh_dim_names}); "
            "take it by its name, as in mesh['tp']"
        )
    return None if mesh.size() == 1 else mesh


def ensure_divisible(layer: str, name: str, value: int, ranks: int) -> int:
    """``value // ranks``; raises ValueError unless ``value`` is a positive multiple of ``ranks``."""
    if value < 1:
        raise ValueError(f"{layer}: {name} must be positive, got {value}")
    if value % ranks:
        fitting = ", ".join(str(n) for n in range(1, max(8, 2 * ranks) + 1) if value % n == 0)
        raise ValueError(
            f"{layer}: {name} must be a multiple of the size of the mesh, got {value} for {ranks} ranks; meshes that "
            f"fit have {fitting} ranks"
        )
    return value // ranks


def to_local(
    module: ShardedModule, *parameters: Tensor | None, partial: Sequence[bool] | None = None
) -> tuple[Tensor | None, ...]:
    """This rank's part of each parameter, for ops; its gradient becomes that of the parameter.

    Parameters of one call should be read by one op, or by ops none of which reads what another computed. A backward
    that torch.distributed.pipelining splits runs these ops as one group: if one leads to another, the second also
    gets the gradient that the first computes.

    Args:
        partial: which of them, whole on every rank, get gradients of this rank's tokens or heads alone; these are
            summed over the ranks, in rank order in fp32.

    Raises:
        RuntimeError: FSDP has a parameter sharded at this moment: ``module`` is not part of what it gathers.
    """
    mesh = module.mesh
    there = [p for p in parameters if p is not None]
    for parameter in there:
        # By identity: comparing meshes costs more.
        if type(parameter) is DTensor and (of := parameter._spec.mesh) is not mesh and of != mesh:
            raise RuntimeError(
                f"{type(module).__name__}: a parameter is still sharded over {of}; give fully_shard the layer, the "
                "attention or the MLP, not a linear inside of it"
            )
    if mesh is None or not there:
        return parameters
    summed = [part for part, p in zip(partial or (), parameters, strict=False) if p is not None]
    local: Sequence[Tensor]
    if torch.compiler.is_compiling():
        unsummed = [p.to_local() for p in there]  # type: ignore[attr-defined]
        each = zip(unsummed, summed or [False] * len(there), strict=True)
        local = [copy_to_group(t, module.group) if part else t for t, part in each]
    elif torch.is_grad_enabled():
        local = _to_local(module, summed, *there)
    else:
        local = [p._local_tensor for p in there]  # type: ignore[attr-defined]
    if len(there) == len(parameters):
        return tuple(local)
    parts = iter(local)
    return tuple(None if p is None else next(parts) for p in parameters)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: ShardedModule, partial: Sequence[bool], *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.module, ctx.partial = module, partial
        ctx.specs = [p._spec for p in parameters]
        return tuple([p._local_tensor.detach() for p in parameters])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        whole = list(grads)
        if True in ctx.partial:
            _sum_partial(ctx, whole)
        return (
            None,
            None,
            *[
                None if g is None else new_dtensor(DTensor, g, spec, requires_grad=False)
                for g, spec in zip(whole, ctx.specs, strict=True)
            ],
        )


# ``Function.apply`` without its Python part, which handles function transforms; DTensors do not support those.
_to_local: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _ToLocal).apply


def _sum_partial(ctx: Any, grads: list[Tensor | None]) -> None:
    """Sums the partial gradients over the ranks, one message a dtype.

    Every rank must send the same number of elements, so a gradient that is missing on this rank counts as zeros.
    """
    wanted = [i for i, partial in enumerate(ctx.partial) if partial and ctx.needs_input_grad[2 + i]]
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i in wanted:
        by_dtype.setdefault(ctx.specs[i].tensor_meta.dtype, []).append(i)
    for dtype, some in by_dtype.items():
        device = ctx.module.mesh.device_type
        shapes = [ctx.specs[i].tensor_meta.shape for i in some]
        flat = torch.cat(
            [
                torch.zeros(shape.numel(), dtype=dtype, device=device) if (g := grads[i]) is None else g.reshape(-1)
                for i, shape in zip(some, shapes, strict=True)
            ]
        )
        name = ctx.module.group.group_name
        total = primitives.all_reduce(flat, True, name, f"backward of {type(ctx.module).__name__}")
        parts = total.split([s.numel() for s in shapes])
        for i, shape, part in zip(some, shapes, parts, strict=True):
            # torch deep-copies no DTensor whose local tensor begins in the middle of its memory.
            grads[i] = (part.clone() if part.storage_offset() else part).view(shape)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling ``module`` runs the forward of ``kind`` and nothing else, so that an op may read its parameters.

    Hooks, wrappers and other forwards (of quantisers, pruning, adapters, FSDP2) take effect in a call only.
    """
    own = module.__dict__
    return (
        type(module).forward is kind.forward
        and "forward" not in own
        and not (own["_forward_pre_hooks"] or own["_forward_hooks"])
        and not (own["_backward_pre_hooks"] or own["_backward_hooks"])
    )


def propagates_errors(forward: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a module's forward: an exception on one rank is published to the other ranks of its group.

    Only the outermost decorated module publishes, without waiting. Other ranks raise in their next collective.
    """

    @functools.wraps(forward)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        module = args[0]
        if module.group is None:  # type: ignore[attr-defined]
            return forward(*args, **kwargs)
        name = type(module).__name__
        with propagate_errors(name, module.group, *args[1:], *kwargs.values()):  # type: ignore[attr-defined]
            return forward(*args, **kwargs)

    # torch.compile counts recompilations by code object: all classes would share the limit of one.
    call.__code__ = call.__code__.replace(co_name=forward.__name__)  # type: ignore[attr-defined]
    return call


def check_input(layer: str, x: Tensor, weight: Tensor, form: str = "[s, ..., {}]", *, parts: int = 1) -> None:
    """Raises unless ``weight`` can be applied to the last dimension of ``x``.

    Args:
        form: shape of x in the error, ``{}`` for its last dimension. Without "..." x must have that many dimensions.
        parts: number of ranks over which the last dimension of x is sharded.
    """
    check_floating(layer, "x", x)
    width, dims = weight.shape[-1] // parts, len(form.split(","))
    if x.dim() == 0 or x.shape[-1] != width or ("..." not in form and x.dim() != dims):
        raise ValueError(f"{layer}: x must be {form.format(width)}, got {list(x.shape)}")
    check_same_device(layer, "x", x, "the weight", weight)
    check_same_dtype(layer, "x", x, "the weight", weight)
