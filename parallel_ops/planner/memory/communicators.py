"""Memory of a process outside the allocator: CUDA's context, and NCCL's buffers for each group of a plan.

NCCL allocates a receiving and a sending buffer for each channel of each peer that a rank is connected to, when a
collective first needs them. A ring or a tree has one peer in each direction on every channel, whatever the size of
the group. Sends and receives, and so all-to-alls, connect to every peer: inside a node on channels of their own,
between nodes through one buffer that all peers share. Groups of one rank have no communicator.

Sources: github.com/NVIDIA/nccl, issue 1685 (10 MiB and 2 MiB a channel, 32 channels a pair of H100; an all-to-all of
eight takes 3.3 GB), issue 964 (544 to 688 MB for an all-reduce among A100, whose ring and tree both have 24 channels);
src/transport/net.cc for what peers on other nodes share.
"""

from functools import lru_cache

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.placement import expert_replicas, group_size, group_stride
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import GIB

# CUDA's context and kernels of torch and its libraries. Assumed.
CONTEXT_BYTES = 0.75 * GIB
# Bytes of one channel to one peer; channels of a ring and of two GPUs of a node, over NVLink and over PCIe (assumed).
CHANNEL_BYTES, CHANNELS, PCIE_CHANNELS = 12 * 2**20, (24, 32), (2, 2)
# Bytes/s of a link that is not PCIe.
_NVLINK = 1e11
# 32 channels of 16 steps of 128 KiB, to send and to receive.
_SHARED = 2 * 32 * 16 * 128 * 2**10
# Channels of a communicator of the package's own (``parallel_ops.comm.nccl.transport.MAX_CTAS``).
OWN_CHANNELS = 16


@lru_cache(maxsize=65536)
def _communicators(groups: tuple[tuple[str, int, int], ...], node_size: int, channels: tuple[int, int]) -> float:
    """Bytes for ``groups``, each with a kind, a size and the distance in ranks between neighbours."""
    ring, pair = (count * CHANNEL_BYTES for count in channels)
    total = 0.0
    for kind, size, stride in groups:
        here = max(1, min(size, node_size // stride))  # ranks of the group in a node
        if size < 2:
            continue
        if kind == "ring":
            total += ring
        elif kind == "sum":
            total += 2 * ring
        else:
            peers = min(size - 1, 2 if kind == "neighbours" else size)
            near = min(here - 1, peers)
            total += near * pair + (_SHARED if peers > near else 0)
    return total


def communicator_bytes(plan: Plan, node_size: int, channels: tuple[int, int]) -> float:
    """Bytes of NCCL's buffers on one GPU, for all groups of a plan on nodes of ``node_size`` GPUs."""
    routed = plan.ep > 1
    context = "neighbours" if plan.cp_kind == "ring" else "pairs"
    groups = (
        ("ring" if plan.sequence_parallel else "sum", plan.tp, 1),
        ("ring" if plan.zero else "sum", group_size(plan, "dp"), group_stride(plan, "dp")),
        ("sum", group_size(plan, "dp_replicate"), plan.tp * plan.cp * plan.dp_shard),
        ("ring", expert_replicas(plan) if routed else 1, plan.expert_shards * plan.ep),
        ("pairs", plan.ep, plan.expert_shards),
        (context, plan.cp, plan.tp),
        ("neighbours", plan.pp, group_stride(plan, "pp")),
        ("ring", plan.gpus, 1),  # the norm of the gradients
    )
    return _communicators(groups, node_size, channels)


def process_bytes(plan: Plan, cluster: Cluster | None = None, *, own_transport: bool = False) -> float:
    """Bytes of a process on a GPU that the allocator does not hold.

    Args:
        plan: the plan.
        cluster: the cluster; ``None`` for nodes of eight GPUs with NVLink.
        own_transport: the package's own communicators send for tensor, context and expert parallelism
            (``PARALLEL_OPS_TRANSPORT=nccl``), beside torch's.
    """
    node_size = cluster.gpus_per_node if cluster else 8
    channels = CHANNELS if cluster is None or cluster.intra.bandwidth >= _NVLINK else PCIE_CHANNELS
    found = CONTEXT_BYTES + communicator_bytes(plan, node_size, channels)
    if own_transport:
        peers = sum(min(size, node_size) - 1 for size in (plan.tp, plan.cp, plan.ep))
        found += peers * OWN_CHANNELS * CHANNEL_BYTES
    return found
