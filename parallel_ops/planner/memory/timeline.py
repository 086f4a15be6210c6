"""Memory of one pipeline rank over the passes of a step.

    states, buffers   parameters, gradients and optimizer; communication buffers, driver and allocator: all the time
    activations       of each stage and micro-batch from the start of F to the end of W or B
    working           of one layer, and under full recomputation its activations, during backward passes
    logits            during forward passes of the stage with the loss

Activations of a micro-batch are the same for all stages of a rank, on average over them. The maximum is the peak of
``memory``, which counts the micro-batches in flight by formula; less where a schedule of few micro-batches holds fewer.
"""

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.memory.memory import PlanMemory, process_memory
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import GIB
from parallel_ops.planner.schedules.schedule import Simulation


class Timeline(NamedTuple):
    """Memory of one GPU of pipeline rank ``rank`` in bytes.

    Attributes:
        times: when it changes, from 0 to the end of the step; one more than values of a part.
        parts: ``states``, ``buffers``, ``activations``, ``recomputed``, ``working`` and ``logits`` between the times.
        limit: memory of the GPU.
    """

    rank: int
    times: list[float]
    parts: dict[str, list[float]]
    limit: float

    @property
    def totals(self) -> list[float]:
        """The sum of the parts between the times."""
        return [sum(values) for values in zip(*self.parts.values(), strict=True)]

    @property
    def caption(self) -> str:
        """The peak in one line."""
        peak = max(self.totals)
        return f"Memory of rank {self.rank}: at most {peak / GIB:.1f} GiB of {self.limit / GIB:.1f}"

    def shown(self) -> list[str]:
        """The parts that are not always empty, from below."""
        return [name for name, values in self.parts.items() if any(values)]


def memory_timeline(model: Model, cluster: Cluster, plan: Plan, simulation: Simulation, rank: int) -> Timeline:
    """The memory of one rank over a simulated step.

    Args:
        model, cluster, plan: of ``simulation`` (``parallel_ops.planner.estimate.simulation``), which checks them.
        simulation: the pipeline of the plan.
        rank: pipeline rank, from 0.

    Raises:
        ValueError: the pipeline has no such rank.
    """
    if not 0 <= rank < plan.pp:
        raise ValueError(f"rank must be from 0 to {plan.pp - 1} for pp={plan.pp}, got {rank}")
    counted = PlanMemory(model, plan, shared={}, **process_memory(cluster, plan))
    stage, fixed = counted.stage(rank), counted.fixed(rank)
    kept, working, recomputed, resident = counted.layers(rank)
    each = (kept * resident + fixed.embedding) / fixed.held / plan.virtual_stages
    backward, peak = {"recomputed": recomputed, "working": working}, working + recomputed
    last, origin = plan.pp * plan.virtual_stages - 1, min(starts[0] for starts in simulation.starts)
    changes: dict[float, Counter[str]] = {0.0: Counter(), simulation.step_time: Counter()}
    rows = (simulation.schedule[rank], simulation.starts[rank], simulation.ends[rank])
    for action, start, end in zip(*rows, strict=True):
        at = changes.setdefault(start - origin, Counter()), changes.setdefault(end - origin, Counter())
        kind = "backward" if action.kind != "F" else "loss" if action.stage == last else "forward"
        for change, sign in zip(at, (1, -1), strict=True):
            change[kind] += sign
        at[0]["held"] += action.kind == "F"
        at[1]["held"] -= action.kind in "WB"
    times = sorted(changes)
    parts: dict[str, list[float]] = {
        name: [] for name in ("states", "buffers", "activations", "recomputed", "working", "logits")
    }
    now: Counter[str] = Counter()
    for time, _ in pairwise(times):
        now.update(changes[time])
        parts["states"].append(stage.states)
        parts["buffers"].append(stage.buffers + stage.runtime + fixed.head)
        parts["activations"].append(now["held"] * each)
        for name, size in backward.items():
            parts[name].append(size if now["backward"] else 0.0)
        other = peak if now["backward"] else 0.0  # of DualPipe's pair; the estimate counts the larger of both
        parts["logits"].append(max(0.0, fixed.logits - other) if now["loss"] else 0.0)
    return Timeline(rank, times, parts, cluster.stage_gpus(plan.pp)[rank].memory)
