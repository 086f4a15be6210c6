"""The link that a group's collectives see, with what of it is reached.

inside a node        the link of one GPU
ring over nodes      the k members that a node has enter and leave it over k adapters: k times the bandwidth of one,
                     at most that of the link inside. Of n hops, one a node is between nodes
direct messages      (all-to-all, pipeline) one adapter a GPU; of n - 1 peers, n - k are on other nodes
above a pod          the flows that leave a pod share what ``oversubscription`` leaves of its adapters. A ring sends
                     k flows out of a pod, however many members it has there
"""

from parallel_ops.planner.cluster import Cluster, Link
from parallel_ops.planner.communication.placement import group_size, group_stride, leaves_node
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.plan import Plan


def group_link(
    cluster: Cluster, plan: Plan, group: str, constants: Efficiency | None = None, *, ring: bool = True
) -> Link:
    """The link that one rank of ``group`` sees in a ring over it, or, without ``ring``, in direct messages.

    ``constants`` take off what collectives do not reach of the bandwidth; None: nothing.
    """
    if not leaves_node(cluster, plan, group):
        share = constants.links if constants else 1.0
        intra = cluster.intra
        return Link(name=intra.name, latency=intra.latency, bandwidth=intra.bandwidth * share)
    kind = "ring" if ring else "neighbours" if group == "pp" else "all"
    return _between_nodes(cluster, group_stride(plan, group), group_size(plan, group), constants, kind)


def _between_nodes(cluster: Cluster, stride: int, size: int, constants: Efficiency | None, kind: str) -> Link:
    inter, intra = cluster.inter, cluster.intra
    links, network = (constants.links, constants.network) if constants else (1.0, 1.0)
    inside = max(1, min(size, cluster.node_size // stride))
    adapters = min(inside, cluster.rails or inside) if kind == "ring" else 1
    bandwidth = inter.bandwidth * network * adapters / _crowding(cluster, stride, size, inside, kind)
    latency = inter.latency
    if kind == "ring":
        latency = (inter.latency + (inside - 1) * intra.latency) / inside
    elif kind == "all" and size > inside:
        bandwidth *= (size - 1) / (size - inside)
    if inside > 1:
        bandwidth = min(bandwidth, intra.bandwidth * links)
    return Link(name=inter.name, latency=latency, bandwidth=bandwidth)


def _crowding(cluster: Cluster, stride: int, size: int, inside: int, kind: str) -> float:
    """How many times more than a pod's share of the network above is asked for, by all groups of a kind at once."""
    pod = cluster.pod or cluster.node_size
    if cluster.oversubscription == 1 or stride * size <= pod:
        return 1.0
    members = max(1, min(size, pod // stride))  # of a group, in one pod
    groups = pod / members
    leaving = {"ring": groups * min(inside, members), "neighbours": groups, "all": pod * (1 - members / size)}[kind]
    return max(1.0, leaving / (pod / cluster.oversubscription))
