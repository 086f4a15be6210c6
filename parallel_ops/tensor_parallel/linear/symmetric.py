"""``overlap="symmetric"``: torch's matmuls over memory that the GPUs of a node read from each other.

    gather    ``torch.ops.symm_mem.fused_all_gather_matmul``: copy engines pull shards, a matmul for each
    scatter   ``torch.ops.symm_mem.fused_matmul_reduce_scatter``: parts are sent as they are done, one sum

A bias is added to the rounded result. Equal shards in 16 bits. Not yet run on several GPUs, so ``overlap="auto"`` does
not try it.
"""

import socket
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.distributed.compat import capturing

# torch's workspaces that captured graphs read and write.
_captured: dict[int, Tensor] = {}

# By group, why its ranks cannot read each other's memory; ``None`` where they can.
_refusals: weakref.WeakKeyDictionary[ProcessGroup, str | None] = weakref.WeakKeyDictionary()


def check(op: str, group: ProcessGroup, rows: Tensor, sizes: Sequence[int]) -> None:
    """ValueError on every rank, naming the reason, if shards of ``rows`` ``[..., K]`` cannot be read by the peers.

    Every rank calls it at the same time; the first call of a group asks all ranks.
    """
    reason: str | None = None
    if len(set(sizes)) > 1:
        reason = f"shards must be equal, got sizes={list(sizes)}"
    elif rows.dtype not in (torch.float16, torch.bfloat16):
        reason = f"it takes float16 and bfloat16, got {rows.dtype}"
    elif rows.shape[-1] % 8:
        reason = f"the last dimension must be a multiple of 8, got {rows.shape[-1]}"
    else:
        if group not in _refusals:
            _refusals[group] = _refusal(group, rows)
        reason = _refusals[group]
    if reason is not None:
        raise ValueError(f'{op}: overlap="symmetric" cannot do this call: {reason}')


def gather_and_multiply(
    group: ProcessGroup, shard: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, list[Tensor]]:
    """The gathered rows ``[P s, K]``, and ``all_gather(shard) weights[i]^T + biases[i]`` as ``[P s, N]`` each.

    Args:
        shard: ``[s, K]``, contiguous. weights: ``[N, K]``.
    """
    whole, products = torch.ops.symm_mem.fused_all_gather_matmul(
        shard, [weight.t() for weight in weights], 0, group.group_name
    )
    _keep_workspace(group, shard)
    return whole, [y if bias is None else y.add_(bias) for y, bias in zip(products, biases, strict=True)]


def multiply_and_scatter(group: ProcessGroup, rows: Tensor, weight: Tensor) -> Tensor:
    """``reduce_scatter(rows weight^T)`` as ``[P s, N] -> [s, N]``, summed over the ranks with one rounding.

    Args:
        rows: ``[P s, K]``. weight: ``[N, K]``.
    """
    total: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(rows, weight.t(), "sum", 0, group.group_name)
    _keep_workspace(group, rows)
    return total


def _keep_workspace(group: ProcessGroup, tensor: Tensor) -> None:
    """Keeps the workspace of a captured call, since a graph has addresses: torch frees it where a call needs more."""
    if capturing(tensor):
        from torch.distributed import _symmetric_memory as symmetric_memory

        workspace = symmetric_memory._group_name_to_workspace_tensor[group.group_name]
        assert workspace is not None
        _captured[workspace.data_ptr()] = workspace


def owned(product: Tensor, shape: Sequence[int]) -> Tensor:
    """A matrix that nothing else refers to, in another shape and not a view: a pipeline stage detaches its output."""
    seen = product.view(tuple(shape))
    return product.new_empty(0).set_(product.untyped_storage(), product.storage_offset(), seen.shape, seen.stride())


def _refusal(group: ProcessGroup, tensor: Tensor) -> str | None:
    """The first reason that a rank has, the same on all ranks."""
    own = _problem(tensor), socket.gethostname(), *_gpus(tensor.device)
    everyone = [own] * group.size()
    dist.all_gather_object(everyone, own, group=group)
    reasons = [f"rank {rank}: {reason}" for rank, (reason, *_) in enumerate(everyone) if reason]
    if len({host for _, host, *_ in everyone}) > 1:
        reasons.append("its ranks are on several nodes")
    for rank, (*_, out_of_reach) in enumerate(everyone):
        peers = (peer for peer, (_, _, gpu, _) in enumerate(everyone) if gpu in out_of_reach)
        reasons += [f"the GPU of rank {rank} has no peer access to that of rank {peer}" for peer in peers]
    return reasons[0] if reasons else None


def _gpus(device: torch.device) -> tuple[str, list[str]]:
    """This rank's GPU, and those that it sees but has no peer access to.

    torch asks for none: its rendezvous ends in "invalid device ordinal", or crashes (pytorch/pytorch#174030).
    """
    if device.type != "cuda":
        return "", []
    gpus = [str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]
    others = [n for n in range(len(gpus)) if n != device.index]
    return gpus[device.index], [gpus[n] for n in others if not torch.cuda.can_device_access_peer(device.index, n)]


def _problem(tensor: Tensor) -> str | None:
    if not tensor.is_cuda:
        return f"tensors are on {tensor.device.type}, and only GPUs of one node read each other's memory"
    major, minor = torch.cuda.get_device_capability(tensor.device)
    if major < 9:
        return f"it needs a GPU of compute capability 9.0 or more, and there is one of {major}.{minor}"
    try:
        from torch.distributed import _symmetric_memory  # noqa: F401 (registers the ops)
    except ImportError as error:
        return f"torch has no symmetric memory ({error})"
    return None
