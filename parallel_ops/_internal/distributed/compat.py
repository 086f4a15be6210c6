"""Names that torch changed between 2.11 and 2.15, and the few that it keeps to itself. Nothing else
knows versions, but ``fsdp`` those of FSDP2."""

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_process_group_store, _resolve_process_group  # type: ignore[attr-defined]
from torch.nn import Module
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode
from torch.utils.checkpoint import checkpoint

# 2.13 renamed the two and warns at every call of the old names.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# ``(DTensor, local, spec, requires_grad=)``: a DTensor whose mesh, placements, shape and strides are those of a spec.
# torch's dispatcher calls this; ``DTensor.from_local`` finds the spec out anew, and ``DTensor.__init__`` only asks the
# compiler to look away, both at many times the cost.
new_dtensor: Callable[..., Tensor] = getattr(Tensor, "_dtensor__new__", None) or (lambda cls, *a, **k: cls(*a, **k))

# The process group of a name: ops carry the name, since schemas have no type for a group.
resolve_group: Callable[[Any], ProcessGroup] = _resolve_process_group


def group_store(group: ProcessGroup) -> dist.Store:  # type: ignore[name-defined]
    """The key-value store through which the ranks of a group met."""
    return _get_process_group_store(group)


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """How long a collective of the group waits from now on. torch gives groups of a mesh its default."""
    # 2.15 made it public and warns at every call of the old name.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def group_timeout(group: ProcessGroup, device: torch.device) -> float:
    """Seconds that a collective of the group may take with tensors on ``device``."""
    return float(group._get_backend(device).options._timeout.total_seconds())


def current_raw_stream(device: torch.device) -> Callable[[], int]:
    """A function that returns the handle of the current stream, in a tenth of the time of a ``torch.cuda.Stream``.

    Args:
        device: a CUDA device with its index.
    """
    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index)


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh whose dimensions are those of ``meshes``, which are parts of one root."""
    return DeviceMesh._concatenate(list(meshes))


def replicate(module: Module, **options: Any) -> None:
    """Replicates a module over a mesh, DTensors and all: FSDP2's machinery, not that of DDP, which knows no DTensor."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(module, **options)


def use_gpu(device: torch.device) -> None:
    """Makes a GPU this process's own, before ``init_process_group``. ``device`` has an index."""
    torch.cuda.set_device(device)
    # 2.15 binds groups of NCCL to the GPU of this number, which may be that of the process that started the ranks.
    os.environ["LOCAL_RANK"] = str(device.index)


def selective_options() -> dict[str, Any]:
    """Options of ``checkpoint`` with which what selective recomputation keeps passes no hooks of saved tensors."""
    # 2.15 warns where hooks are in place and nobody has said so.
    known = inspect.signature(checkpoint).parameters
    return {"respect_saved_tensors_hooks": False} if "respect_saved_tensors_hooks" in known else {}


def in_backward() -> bool:
    """True while a backward runs on this thread: a forward then is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def capturing(t: Tensor) -> bool:
    """True while a CUDA graph captures the current stream of a tensor's device: the host must query no event."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def inductor_graphs() -> bool:
    """True if this process has CUDA graphs of Inductor, ``torch.compile(mode="reduce-overhead")``, or is about to."""
    return "torch._inductor.cudagraph_trees" in sys.modules


@contextlib.contextmanager
def suspended_modes() -> Iterator[Sequence[Any]]:
    """Dispatch modes, such as those of selective recomputation, see nothing of what runs in the block."""
    with _disable_current_modes() as modes:
        yield modes


@contextlib.contextmanager
def resumed_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Within ``suspended_modes``: its modes see what runs in this block."""
    for mode in reversed(modes):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()
