"""Gathered keys that cross the link between nodes once a node.

The ranks of a group lie on nodes of ``m`` adjacent ranks each. In the first level the ranks with the same place on
their nodes exchange keys: each gets those that any query of its node sees. In the second the ranks of a node exchange
what they have then, for their own queries. Gradients of keys go the same way back: summed on the node, then sent once
to the owner, and added there in the order of nodes, in fp32. So of each key and its gradient a node receives and sends
one copy in the place of up to ``m``.
"""

import os
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from parallel_ops._internal.token_range import TokenRange
from parallel_ops.context_parallel.schedule.blocks import query_limits
from parallel_ops.context_parallel.schedule.ring import Ring
from parallel_ops.context_parallel.token_ranges import merged, visible_keys


@dataclass(frozen=True)
class Level(Ring):
    """Ranks that exchange the keys ``shards``.

    Args:
        queries: for each rank the tokens whose queries it gets keys for.
    """

    queries: tuple[tuple[TokenRange, ...], ...] = ()

    def parts(self, source: int, target: int) -> tuple[TokenRange, ...]:
        """The keys of ``source`` that are visible to the ``queries`` of ``target``."""
        queries, ranges = self.queries[target], self.ranges
        limits = None if ranges is None else query_limits(ranges, queries)
        return visible_keys(self.shards[source], queries, self.options.left, self.options.right, limits)


def ranks_per_node(group: ProcessGroup) -> int:
    """Ranks of the group on each node, by ``LOCAL_WORLD_SIZE`` of torchrun; 1 if they are not as many adjacent ones on
    every node, or all on one."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdecimal() or not int(local):
        return 1
    nodes = [rank // int(local) for rank in dist.get_process_group_ranks(group)]
    m = nodes.count(nodes[0])
    adjacent = [node for node in dict.fromkeys(nodes) for _ in range(m)]
    return m if adjacent == nodes and m < len(nodes) else 1


def levels_of(ring: Ring, m: int) -> tuple[Level, Level]:
    """The exchange between nodes of ``m`` adjacent ranks, and the one inside of this rank's node."""
    node, place = divmod(ring.at, m)
    nodes = range(len(ring.shards) // m)
    of_nodes = tuple(tuple(part for shard in ring.shards[j * m : (j + 1) * m] for part in shard) for j in nodes)

    def across(at: int) -> Level:
        members = [j * m + at for j in nodes]
        ranks, shards = [ring.ranks[i] for i in members], [ring.shards[i] for i in members]
        return Level(ring.op, ring.transport, ranks, node, shards, ring.options, ring.ranges, queries=of_nodes)

    held = []
    for at in range(m):
        level = across(at)
        parts = [level.own if j == node else level.parts(j, node) for j in nodes]
        held.append(merged([part for of_rank in parts for part in of_rank]))
    own = slice(node * m, (node + 1) * m)
    inside = Level(
        ring.op, ring.transport, ring.ranks[own], place, held, ring.options, ring.ranges,
        queries=tuple(ring.shards[own]),
    )  # fmt: skip
    return across(place), inside
