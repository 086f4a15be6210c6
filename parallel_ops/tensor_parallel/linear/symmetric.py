"""``overlap="symmetric"``: matmuls over memory that the GPUs of a node read from each other.

    gather, "gated"   copy engines pull shards, one matmul of ours whose tiles wait for their flags
                      (``comm.symmetric_memory``, ``triton_kernels.gated_matmul``)
    gather, "fused"   ``torch.ops.symm_mem.fused_all_gather_matmul``: copy engines pull shards, a matmul for each
    scatter           ``torch.ops.symm_mem.fused_matmul_reduce_scatter``: parts are sent as they are done, one sum

A gather takes the one that is the faster at the first call of a kind; where none may be measured torch's, and ours
where there is a bias, which torch's matmul has not and which would be a second rounding. A sum's bias is added to the
rounded sum. Equal shards in 16 bits. Nothing of it has run on several GPUs, so ``overlap="auto"`` does not try it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.comm.symmetric_memory import Peers, peers_of, start_pulls
from parallel_ops.tensor_parallel.linear.choose import fastest_of, may_measure, measured
from parallel_ops.tensor_parallel.linear.chunked import multiply

GATED, FUSED = 1, 2


def check(op: str, group: ProcessGroup, rows: Tensor, sizes: Sequence[int]) -> None:
    """ValueError on every rank, naming the reason, if shards of ``rows`` ``[..., K]`` cannot be read by the peers."""
    reason: str | Peers | None = None
    if len(set(sizes)) > 1:
        reason = f"shards must be equal, got sizes={list(sizes)}"
    elif rows.dtype not in (torch.float16, torch.bfloat16):
        reason = f"it takes float16 and bfloat16, got {rows.dtype}"
    elif rows.shape[-1] % 8:
        reason = f"the last dimension must be a multiple of 8, got {rows.shape[-1]}"
    else:
        reason = peers_of(group, rows)
    if isinstance(reason, str):
        raise ValueError(f'{op}: overlap="symmetric" cannot do this call: {reason}')


def gather_and_multiply(
    group: ProcessGroup, shard: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, list[Tensor]]:
    """The gathered rows ``[P s, K]``, and ``all_gather(shard) weights[i]^T + biases[i]`` as ``[P s, N]`` each.

    Args:
        shard: ``[s, K]``, contiguous. weights: ``[N, K]``.
    """

    def run(way: int) -> tuple[Tensor, list[Tensor]]:
        if way == GATED:
            return _gated(group, shard, weights, biases)
        whole, products = torch.ops.symm_mem.fused_all_gather_matmul(
            shard, [weight.t() for weight in weights], 0, group.group_name
        )
        return whole, list(products)

    if any(bias is not None for bias in biases):
        return run(GATED)
    known, key = measured(group), ("symmetric", shard.shape, shard.dtype, *(w.shape for w in weights))
    if key not in known:
        if not may_measure(shard.device):
            return run(FUSED)
        seconds = fastest_of(group, shard.device, (FUSED, GATED), run)
        known[key] = GATED if seconds[1] < seconds[0] else FUSED
    return run(known[key])


def multiply_and_scatter(group: ProcessGroup, rows: Tensor, weight: Tensor) -> Tensor:
    """``reduce_scatter(rows weight^T)`` as ``[P s, N] -> [s, N]``, summed over the ranks with one rounding.

    Args:
        rows: ``[P s, K]``. weight: ``[N, K]``.
    """
    total: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(rows, weight.t(), "sum", 0, group.group_name)
    return total


def owned(product: Tensor, shape: Sequence[int]) -> Tensor:
    """A matrix that nothing else refers to, in another shape and not a view: a pipeline stage detaches its output."""
    seen = product.view(tuple(shape))
    return product.new_empty(0).set_(product.untyped_storage(), product.storage_offset(), seen.shape, seen.stride())


def _gated(
    group: ProcessGroup, shard: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, list[Tensor]]:
    peers = peers_of(group, shard)
    assert isinstance(peers, Peers)  # ``check`` was called
    outputs = [shard.new_empty((shard.shape[0] * peers.size, weight.shape[0])) for weight in weights]
    pulls = start_pulls(peers, shard)
    # The largest matmul waits for the flags; when it ends, all rows are there for the others.
    first = max(range(len(weights)), key=lambda i: weights[i].shape[0])
    pulls.multiply(weights[first], biases[first], outputs[first])
    pulls.wait()
    for i, (weight, bias, y) in enumerate(zip(weights, biases, outputs, strict=True)):
        if i != first:
            multiply(pulls.whole, weight, bias, y)
    return pulls.whole, outputs
