"""One collective as a ``Transfer``: what a rank sends, and how long it takes, its start included."""

import math
from dataclasses import replace

from parallel_ops.planner.cluster import Link
from parallel_ops.planner.communication import collectives
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.results import Transfer


def start(efficiency: Efficiency, ranks: int) -> float:
    """Seconds of a collective beyond latency and bandwidth: it starts when the last rank is there."""
    return efficiency.collective * math.log2(ranks)


def transfer(
    group: str, collective: str, algorithm: str, link: Link, size: int, sent: float, seconds: float
) -> Transfer:
    """One collective over ``size`` ranks, none of whose time is exposed."""
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


def half(group: str, kind: str, ranks: int, size: float, link: Link, efficiency: Efficiency) -> Transfer:
    """An all-gather or a reduce-scatter of ``size`` bytes, the two halves of an all-reduce."""
    seconds = collectives.ring_all_gather(ranks, size, link) + start(efficiency, ranks)
    return transfer(group, kind, "ring", link, ranks, (ranks - 1) / ranks * size, seconds)


def all_reduce(group: str, ranks: int, size: float, link: Link, efficiency: Efficiency) -> Transfer:
    """A sum of ``size`` bytes."""
    algorithm, seconds = collectives.all_reduce(ranks, size, link)
    seconds += start(efficiency, ranks)
    return transfer(group, "all-reduce", algorithm, link, ranks, 2 * (ranks - 1) / ranks * size, seconds)


def repeat(transfer: Transfer, count: int, exposed: float = 0.0) -> Transfer:
    """``count`` times one transfer."""
    return replace(
        transfer,
        count=count,
        bytes=transfer.bytes * count,
        seconds=transfer.seconds * count,
        exposed=exposed,
    )
