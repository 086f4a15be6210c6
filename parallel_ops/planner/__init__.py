"""Cost model and search of parallel training strategies.

``estimate`` computes the ``Estimate`` of a ``Model`` on a ``Cluster`` under a ``Plan``; ``search`` ranks all plans.
Needs neither torch nor a GPU.
"""

from parallel_ops.planner import presets
from parallel_ops.planner.cluster import GPU, Cluster, Interconnect, Part
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.compute.software import efficiency
from parallel_ops.planner.error_band import ErrorBand, error_band
from parallel_ops.planner.estimate import communication, estimate
from parallel_ops.planner.memory.memory import memory
from parallel_ops.planner.model import LatentAttention, Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import Estimate, StageMemory, Transfer
from parallel_ops.planner.rules import RULES, broken_rules
from parallel_ops.planner.search.options import SearchOptions
from parallel_ops.planner.search.result import NearMiss, Rejection, SearchResult, Sensitivity
from parallel_ops.planner.search.search import search, smallest_cluster

__all__ = [
    "GPU",
    "RULES",
    "Cluster",
    "Efficiency",
    "ErrorBand",
    "Estimate",
    "Interconnect",
    "LatentAttention",
    "Model",
    "NearMiss",
    "Part",
    "Plan",
    "Rejection",
    "SearchOptions",
    "SearchResult",
    "Sensitivity",
    "StageMemory",
    "Transfer",
    "broken_rules",
    "communication",
    "efficiency",
    "error_band",
    "estimate",
    "memory",
    "presets",
    "search",
    "smallest_cluster",
]
