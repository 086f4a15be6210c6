"""The published run of a model that is nearest to a cluster."""

import math
from typing import NamedTuple

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.validation.large_runs import deepseek, llama
from parallel_ops.planner.validation.measurement import Measurement
from parallel_ops.planner.validation.published_runs import published_runs

# A run on sequences of another length says little about how to divide a model: at most this many times as long.
_LENGTHS = 4


class Recipe(NamedTuple):
    """The division of a published run: sizes of tensor, pipeline, context and expert parallelism.

    Attributes:
        run: its table and name.
    """

    run: str
    tp: int
    pp: int
    cp: int
    ep: int

    def divides(self, plan: Plan) -> bool:
        """Whether ``plan`` divides the model as the run does."""
        return (plan.tp, plan.pp, plan.cp, plan.ep) == self[1:]


def published_recipe(model: Model, cluster: Cluster) -> Recipe | None:
    """The published run of the model, by name, whose sizes divide the cluster, on the nearest GPU and number of GPUs;
    of equals the last released. ``None`` if there is none with sequences of a similar length."""

    def far(run: Measurement) -> tuple[object, ...]:
        gpu, other, plan = cluster.gpu, run.cluster.gpu, run.plan
        apart = cluster.gpus % (plan.tp * plan.pp * plan.cp) > 0 or cluster.gpus // plan.pp % plan.ep > 0
        length = abs(math.log2(run.model.seq_length / model.seq_length))
        size = abs(math.log2(plan.gpus / cluster.gpus))
        return (
            apart,
            gpu.name != other.name,
            gpu.generation != other.generation,
            length,
            size,
        )

    runs = [*published_runs(model.name), *(run for run in (*llama(), *deepseek()) if run.model.name == model.name)]
    near = [run for run in runs if 1 / _LENGTHS <= run.model.seq_length / model.seq_length <= _LENGTHS]
    if not near:
        return None
    near.sort(key=lambda run: run.name.partition(",")[0], reverse=True)  # names begin with the release
    nearest = min(near, key=far)
    plan = nearest.plan
    return Recipe(f"{nearest.table}, {nearest.name}", plan.tp, plan.pp, plan.cp, plan.ep)
