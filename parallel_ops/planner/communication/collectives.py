"""What a collective takes under the alpha-beta model.

n ranks, S bytes of the whole tensor, latency alpha and bandwidth B of the slowest link:

    ring all-gather, reduce-scatter    (n - 1) alpha + (n - 1) / n S / B
    ring all-reduce                    twice that
    tree all-reduce                    2 log2(n) alpha + 2 S / B          two pipelined binary trees
    all-to-all, S bytes a rank         alpha + (n - 1) / n S / B          all messages are posted at once
    send and receive                   alpha + S / B

Sources: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005; Sanders,
Speck and Traeff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009.
"""

import math

from parallel_ops.planner.cluster import Link


def ring_all_gather(ranks: int, size: float, link: Link) -> float:
    """Seconds until each of ``ranks`` has all ``size`` bytes, of which it had an equal part. Reduce-scatter is the
    same."""
    return (ranks - 1) * (link.latency + size / ranks / link.bandwidth)


def ring_all_reduce(ranks: int, size: float, link: Link) -> float:
    """Seconds of a reduce-scatter and an all-gather of ``size`` bytes."""
    return 2 * ring_all_gather(ranks, size, link)


def tree_all_reduce(ranks: int, size: float, link: Link) -> float:
    """Seconds of a reduction to a root and a broadcast of ``size`` bytes along two trees."""
    return 2 * (math.ceil(math.log2(ranks)) * link.latency + size / link.bandwidth) if ranks > 1 else 0.0


def all_reduce(ranks: int, size: float, link: Link) -> tuple[str, float]:
    """The faster of ring and tree, and its seconds."""
    ring, tree = ring_all_reduce(ranks, size, link), tree_all_reduce(ranks, size, link)
    return ("tree", tree) if tree < ring else ("ring", ring)


def all_to_all(ranks: int, size: float, link: Link, *, torus: bool = False) -> float:
    """Seconds to exchange ``size`` bytes that each rank holds for all ranks together.

    On a three-dimensional torus of side k a message takes 3 k / 4 hops on average, over three axes: k / 4 as long where
    that is more than one.
    """
    if ranks == 1:
        return 0.0
    detour = max(1.0, ranks ** (1 / 3) / 4) if torus else 1.0
    return link.latency + (ranks - 1) / ranks * size / link.bandwidth * detour


def send_receive(size: float, link: Link) -> float:
    """Seconds of one message of ``size`` bytes."""
    return link.latency + size / link.bandwidth
