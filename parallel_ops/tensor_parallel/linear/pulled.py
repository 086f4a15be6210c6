"""Gathers over memory that the ranks of a node share: one product that waits for flags, or torch's own op.

    "gated"   ``comm.pulls`` and ``triton_kernels.gated_product``: copy engines pull shards, tiles wait for their flags
    "fused"   ``torch.ops.symm_mem.fused_all_gather_matmul``: copy engines pull shards, a product for each

Both take equal shards in 16 bits on GPUs of one node, and no exchange of messages. torch's op has no bias, which would
be a second rounding, so calls with one are not for it. ``overlap="auto"`` tries both in groups that ``allow_pulls``
names. Neither has run on several GPUs yet.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops._internal.overlap_schedule import FUSED, GATED
from parallel_ops.comm.pulls import Device, device_of, start_pulls
from parallel_ops.tensor_parallel.linear.products import multiply

_allowed: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def allow_pulls(group: ProcessGroup, allowed: bool = True) -> None:
    """Lets ``overlap="auto"`` gather over shared memory in ``group``, where that is measured to be faster.

    Args:
        group: ranks of one node; all of them must call this between the same calls.

    Raises: TypeError: ``group`` is not a process group.
    """
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"allow_pulls: group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
    (_allowed.add if allowed else _allowed.discard)(group)


def may_pull(group: ProcessGroup, like: Tensor, sizes: Sequence[int]) -> bool:
    """Whether ``overlap="auto"`` may gather rows like these so; the same on every rank."""
    return group in _allowed and problem(group, like, sizes) is None


def problem(group: ProcessGroup, rows: Tensor, sizes: Sequence[int]) -> str | None:
    """Why shards of ``rows``, ``[..., K]``, cannot be pulled; ``None`` if they can. The same on every rank."""
    if len(set(sizes)) > 1:
        return f"shards must be equal, got sizes={list(sizes)}"
    if rows.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, got {rows.dtype}"
    if rows.shape[-1] % 8:
        return f"the last dimension must be a multiple of 8, got {rows.shape[-1]}"
    found = device_of(group, rows)
    return found if isinstance(found, str) else None


def check(op: str, way: int, group: ProcessGroup, rows: Tensor, sizes: Sequence[int], *, bias: bool) -> None:
    """ValueError on every rank, naming the reason, for a call that this way cannot do."""
    reason = "it has no bias" if bias and way == FUSED else problem(group, rows, sizes)
    if reason is not None:
        word = "gated" if way == GATED else "fused"
        raise ValueError(f"{op}: overlap={word!r} cannot do this call: {reason}")


def gather_and_multiply(
    way: int,
    group: ProcessGroup,
    shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
) -> Tensor:
    """``outputs[i] = all_gather(shard) weights[i]^T + biases[i]``; returns the gathered rows.

    Args:
        way: ``GATED`` or ``FUSED``. shard: ``[s, K]``, contiguous. weights: ``[N, K]``. outputs: ``[P s, N]``.
    """
    if way == GATED:
        device = device_of(group, shard)
        assert not isinstance(device, str)  # ``problem`` was asked
        return _gated(device, shard, weights, biases, outputs)
    whole, found = torch.ops.symm_mem.fused_all_gather_matmul(
        shard, [weight.t() for weight in weights], 0, group.group_name
    )
    for y, product in zip(outputs, found, strict=True):
        y.copy_(product)
    gathered: Tensor = whole
    return gathered


def _gated(
    device: Device,
    shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
) -> Tensor:
    pulls = start_pulls(device, shard)
    # The largest product waits for the flags; when it ends, all rows are there for the others.
    first = max(range(len(weights)), key=lambda i: weights[i].shape[0])
    pulls.multiply(weights[first], biases[first], outputs[first])
    pulls.wait()
    for i, (weight, bias, y) in enumerate(zip(weights, biases, outputs, strict=True)):
        if i != first:
            multiply(pulls.whole, weight, bias, y)
    return pulls.whole
