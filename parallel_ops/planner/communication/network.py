"""The time of a collective under the alpha-beta model, and the link that a group's collectives use.

n ranks, S bytes of the whole tensor, latency alpha and bandwidth B of the slowest link:

    ring all-gather, reduce-scatter    (n - 1) alpha + (n - 1) / n S / B
    ring all-reduce                    twice that
    tree all-reduce                    2 log2(n) alpha + 2 S / B          two pipelined binary trees
    all-to-all, S bytes a rank         alpha + (n - 1) / n S / B          all messages are posted at once
    send and receive                   alpha + S / B

Sources: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005; Sanders,
Speck and Traeff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009.

The link, and the bandwidth that one rank gets:

    inside a node      the link of one GPU
    ring over nodes    the k members in a node enter and leave it over k adapters: k times the bandwidth of one, at most
                       that of the link inside. One hop per node, of n in all, is between nodes
    direct messages    (all-to-all, pipeline) one adapter per GPU; of n - 1 peers, n - k are on other nodes
    above a pod        the flows that leave a pod share its adapters' bandwidth over ``oversubscription``. A ring sends
                       k flows out of a pod, however many members it has there
"""

import math
from dataclasses import replace
from functools import lru_cache

from parallel_ops.planner.cluster import Cluster, Interconnect
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.placement import group_size, group_stride, leaves_node
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import Transfer


def all_gather_seconds(ranks: int, size: float, link: Interconnect) -> float:
    """Seconds of a ring all-gather, or reduce-scatter, of ``size`` bytes in all."""
    return (ranks - 1) * (link.latency + size / ranks / link.bandwidth)


def all_reduce_seconds(ranks: int, size: float, link: Interconnect) -> tuple[str, float]:
    """The faster algorithm, ``"ring"`` or ``"tree"``, and its seconds for ``size`` bytes."""
    ring = 2 * all_gather_seconds(ranks, size, link)
    tree = 2 * (math.ceil(math.log2(ranks)) * link.latency + size / link.bandwidth) if ranks > 1 else 0.0
    return ("tree", tree) if tree < ring else ("ring", ring)


def all_to_all_seconds(ranks: int, size: float, link: Interconnect, *, torus: bool = False) -> float:
    """Seconds to exchange ``size`` bytes that each rank holds for all ranks together.

    On a three-dimensional torus of side k a message takes 3 k / 4 hops on average, over three axes: k / 4 as long where
    that is more than one.
    """
    if ranks == 1:
        return 0.0
    detour = max(1.0, ranks ** (1 / 3) / 4) if torus else 1.0
    return link.latency + (ranks - 1) / ranks * size / link.bandwidth * detour


def start_seconds(efficiency: Efficiency, ranks: int) -> float:
    """Seconds of a collective beyond latency and bandwidth: it starts when the last rank arrives."""
    return efficiency.collective * math.log2(ranks)


def message_seconds(size: float, link: Interconnect, efficiency: Efficiency) -> float:
    """Seconds of one message of ``size`` bytes, with its start."""
    return link.latency + size / link.bandwidth + start_seconds(efficiency, 2)


def transfer(
    group: str, collective: str, algorithm: str, link: Interconnect, size: int, sent: float, seconds: float
) -> Transfer:
    """One collective over ``size`` ranks, in which each sends ``sent`` bytes. None of its time is exposed."""
    return Transfer(
        group=group,
        collective=collective,
        algorithm=algorithm,
        link=link.name,
        size=size,
        count=1,
        bytes=sent,
        seconds=seconds,
        exposed=0.0,
    )


def ring_transfer(
    group: str, collective: str, ranks: int, size: float, link: Interconnect, *, start: float
) -> Transfer:
    """An all-gather or a reduce-scatter of ``size`` bytes. ``start``: seconds beyond latency and bandwidth."""
    seconds = all_gather_seconds(ranks, size, link) + start
    return transfer(group, collective, "ring", link, ranks, (ranks - 1) / ranks * size, seconds)


def all_reduce_transfer(
    group: str, ranks: int, size: float, link: Interconnect, *, start: float, gathered: float = 0.0
) -> Transfer:
    """An all-reduce of ``size`` bytes. ``start``: seconds beyond latency and bandwidth. ``gathered``: bytes up to which
    every rank gets the tensors of all others, and adds them."""
    if size <= gathered:
        whole = ring_transfer(group, "all-reduce", ranks, ranks * size, link, start=start)
        return replace(whole, algorithm="gather")
    algorithm, seconds = all_reduce_seconds(ranks, size, link)
    return transfer(group, "all-reduce", algorithm, link, ranks, 2 * (ranks - 1) / ranks * size, seconds + start)


def repeat(transfer: Transfer, count: float, exposed: float = 0.0) -> Transfer:
    """``count`` times one transfer. ``exposed``: seconds of all of them that are not hidden."""
    return replace(
        transfer, count=count, bytes=transfer.bytes * count, seconds=transfer.seconds * count, exposed=exposed
    )


def group_link(
    cluster: Cluster, plan: Plan, group: str, constants: Efficiency | None = None, *, ring: bool = True
) -> Interconnect:
    """The link that one rank of ``group`` uses.

    Args:
        constants: shares of the bandwidth that collectives reach; ``None`` for all of it.
        ring: the group communicates in a ring; else by direct messages.
    """
    if not leaves_node(cluster, plan, group):
        return _inside_node(cluster, constants)
    kind = "ring" if ring else {"pp": "neighbours", "ep": "dispatch"}.get(group, "all")
    return _between_nodes(cluster, group_stride(plan, group), group_size(plan, group), constants, kind)


@lru_cache(maxsize=1024)
def _inside_node(cluster: Cluster, constants: Efficiency | None) -> Interconnect:
    share = constants.links if constants else 1.0
    return replace(cluster.intra, bandwidth=cluster.intra.bandwidth * share)


@lru_cache(maxsize=65536)
def _between_nodes(cluster: Cluster, stride: int, size: int, constants: Efficiency | None, kind: str) -> Interconnect:
    inter, intra = cluster.inter, cluster.intra
    links, network = (constants.links, constants.network) if constants else (1.0, 1.0)
    if kind == "dispatch":
        network, kind = (constants.dispatch if constants else 0) or network, "all"
    inside = max(1, min(size, cluster.node_size // stride))
    adapters = min(inside, cluster.rails or inside) if kind == "ring" else 1
    bandwidth = inter.bandwidth * network * adapters / _contention(cluster, stride, size, inside, kind)
    latency = inter.latency
    if kind == "ring":
        latency = (inter.latency + (inside - 1) * intra.latency) / inside
    elif kind == "all" and size > inside:
        bandwidth *= (size - 1) / (size - inside)
    if inside > 1:
        bandwidth = min(bandwidth, intra.bandwidth * links)
    return Interconnect(name=inter.name, latency=latency, bandwidth=bandwidth)


def _contention(cluster: Cluster, stride: int, size: int, inside: int, kind: str) -> float:
    """Demand of all groups of a kind on the network above a pod, over the pod's share of it; at least 1."""
    pod = cluster.pod or cluster.node_size
    if cluster.oversubscription == 1 or stride * size <= pod:
        return 1.0
    members = max(1, min(size, pod // stride))  # of a group, in one pod
    groups = pod / members
    leaving = {"ring": groups * min(inside, members), "neighbours": groups, "all": pod * (1 - members / size)}[kind]
    return max(1.0, leaving / (pod / cluster.oversubscription))
