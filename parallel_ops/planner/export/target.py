"""A training system: the plans that it can run, and the export of a plan."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.schedules.action import WHOLE_BACKWARD


def _any_plan(model: Model, cluster: Cluster, plan: Plan) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True, kw_only=True)
class ExportTarget:
    """A training system that plans can be exported to.

    Attributes:
        name: name of the system, as in ``--for`` and ``--format``.
        write: returns the text of a config file or command for a plan that the system can run.
        limits: for some fields of ``Plan``, the supported values and a sentence about them.
        problems: yields reasons beyond ``limits`` why the system cannot run a plan.
        own: returns the system's defaults, as changes to fields of a plan that a user leaves open.
    """

    name: str
    write: Callable[[Model, Cluster, Plan], str]
    limits: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)
    problems: Callable[[Model, Cluster, Plan], Iterator[str]] = _any_plan
    own: Callable[[Plan], dict[str, Any]] = lambda plan: {}

    def problem(self, model: Model, cluster: Cluster, plan: Plan) -> str | None:
        """Why the system cannot run the plan; ``None`` if it can."""
        whole_backward = plan.pp > 1 and plan.schedule in WHOLE_BACKWARD
        unused = {"cp_kind": plan.cp == 1, "schedule": plan.pp == 1, "input_grad_first": not whole_backward}
        for name, (values, has) in self.limits.items():
            value = getattr(plan, name)
            if value not in values and not unused.get(name, False):
                return f"{has}, not {name}={str(value).lower() if isinstance(value, bool) else value}"
        return next(self.problems(model, cluster, plan), None)
