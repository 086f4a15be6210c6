"""Neighbouring pipeline stages that need the same memory, as one: most stages of a long pipeline are alike."""

from typing import NamedTuple

from parallel_ops.planner.cluster import GPU
from parallel_ops.planner.results import DEVICE_MEMORY, GIB, Estimate, StageMemory


class StageGroup(NamedTuple):
    """Stages ``first`` to ``last``, of which ``memory`` is one, on one kind of GPU."""

    first: int
    last: int
    memory: StageMemory
    gpu: GPU

    @property
    def label(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"


def stage_groups(estimate: Estimate) -> list[StageGroup]:
    """The stages of an estimate in order. Those are alike that differ by less than 0.005 GiB in every part."""
    groups: list[StageGroup] = []
    for stage, gpu in zip(estimate.memory, estimate.cluster.stage_gpus(estimate.plan.pp), strict=True):
        if groups and groups[-1].gpu == gpu and _alike(groups[-1].memory, stage):
            groups[-1] = groups[-1]._replace(last=stage.stage)
        else:
            groups.append(StageGroup(stage.stage, stage.stage, stage, gpu))
    return groups


def _alike(one: StageMemory, other: StageMemory) -> bool:
    return all(abs(getattr(one, name) - getattr(other, name)) < 0.005 * GIB for name in DEVICE_MEMORY)
