"""A plan in the words of the systems that can run it.

What a system cannot do is refused with the reason, rather than left out: a config that runs something else than the
plan is worse than none. What neither the shape nor the plan says (data, learning rate, rotary base, ...) is for the
user to add.
"""

from parallel_ops.planner.checks import unknown
from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.export.deepspeed import DEEPSPEED
from parallel_ops.planner.export.megatron import MEGATRON
from parallel_ops.planner.export.target import ExportTarget
from parallel_ops.planner.export.torchrun import TORCHRUN
from parallel_ops.planner.export.torchtitan import TORCHTITAN
from parallel_ops.planner.export.trainer import TRAINER
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan

__all__ = ["FORMATS", "TARGETS", "ExportTarget", "export", "find_target"]

# Systems that a search can be limited to; a torchrun command starts any script.
TARGETS: dict[str, ExportTarget] = {found.name: found for found in (DEEPSPEED, MEGATRON, TORCHTITAN, TRAINER)}
FORMATS: dict[str, ExportTarget] = {**TARGETS, TORCHRUN.name: TORCHRUN}


def find_target(name: str) -> ExportTarget:
    """The system of that name.

    Raises:
        ValueError: there is none; with the nearest ones.
    """
    if name not in FORMATS:
        raise unknown("system", name, FORMATS)
    return FORMATS[name]


def export(format: str, model: Model, cluster: Cluster, plan: Plan) -> str:
    """The plan as the text of a config file or command.

    Args:
        format: one of ``FORMATS``.

    Raises:
        ValueError: an unknown format, or a plan that the system cannot run.
    """
    system = find_target(format)
    if reason := system.problem(model, cluster, plan):
        raise ValueError(f"export: {format} cannot run this plan: {reason}")
    return system.write(model, cluster, plan)
