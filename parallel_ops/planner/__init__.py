"""What a parallel training strategy costs, which one to use, and why the others lose.

A ``Model`` on a ``Cluster`` under a ``Plan`` gives an ``Estimate``. Needs neither torch nor a GPU.
"""

from parallel_ops.planner import presets
from parallel_ops.planner.band import Band, band
from parallel_ops.planner.cluster import GPU, Cluster, Link, Part
from parallel_ops.planner.communication.links import communication
from parallel_ops.planner.compute.efficiency import Efficiency, efficiency
from parallel_ops.planner.estimate import estimate
from parallel_ops.planner.memory.memory import memory
from parallel_ops.planner.model import LatentAttention, Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import Estimate, NearMiss, Rejection, SearchResult, Sensitivity, StageMemory, Transfer
from parallel_ops.planner.search.options import Options
from parallel_ops.planner.search.rules import RULES, broken_rules
from parallel_ops.planner.search.search import search, smallest_cluster

__all__ = [
    "GPU",
    "RULES",
    "Band",
    "Cluster",
    "Efficiency",
    "Estimate",
    "LatentAttention",
    "Link",
    "Model",
    "NearMiss",
    "Options",
    "Part",
    "Plan",
    "Rejection",
    "SearchResult",
    "Sensitivity",
    "StageMemory",
    "Transfer",
    "band",
    "broken_rules",
    "communication",
    "efficiency",
    "estimate",
    "memory",
    "presets",
    "search",
    "smallest_cluster",
]
