"""Export of a plan as the configuration of a training system.

A plan that a system cannot run is an error with the reason: a configuration that runs something else is worse than
none. Users add what neither model nor plan contains (data, learning rate, rotary base, ...).
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

__all__ = ["FORMATS", "TARGETS", "ExportTarget", "export", "find_target", "systems"]

# Systems that a search can be limited to; a torchrun command starts any script.
TARGETS: dict[str, ExportTarget] = {found.name: found for found in (DEEPSPEED, MEGATRON, TORCHTITAN, TRAINER)}
FORMATS: dict[str, ExportTarget] = {**TARGETS, TORCHRUN.name: TORCHRUN}


def find_target(name: str) -> ExportTarget:
    """The system of that name.

    Raises:
        ValueError: the name is unknown; the message has the nearest ones.
    """
    if name not in FORMATS:
        raise unknown("system", name, FORMATS)
    return FORMATS[name]


def systems(model: Model, cluster: Cluster, plan: Plan) -> tuple[str, ...]:
    """Names of the systems that can run a plan, each with its own defaults of what it does not leave open."""
    return tuple(name for name, system in TARGETS.items() if system.runs(model, cluster, plan))


def export(format: str, model: Model, cluster: Cluster, plan: Plan) -> str:
    """The text of a config file or command that runs the plan.

    Args:
        format: one of ``FORMATS``.

    Raises:
        ValueError: the format is unknown, or the system cannot run the plan.
    """
    system = find_target(format)
    unwritten = (model.lora_rank and system.adapters) or (model.hybrid and system.hybrids)
    if reason := unwritten or system.problem(model, cluster, plan):
        raise ValueError(f"export: {format} cannot run this plan: {reason}")
    return system.write(model, cluster, plan)
