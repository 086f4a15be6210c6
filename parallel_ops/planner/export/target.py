"""What a system can run of all plans, and how it is told to."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan


def _any_plan(model: Model, cluster: Cluster, plan: Plan) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True, kw_only=True)
class ExportTarget:
    """A system that plans are written for.

    Attributes:
        limits: for some fields of ``Plan``, the values that the system has, and what it has in words.
        problems: reasons why it cannot run a plan, beyond ``limits``.
        own: what the system does of its own accord, as changes to a plan that leaves it open.
        write: the plan as the text of a file or command; it need not ask whether the system can run it.
    """

    name: str
    write: Callable[[Model, Cluster, Plan], str]
    limits: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)
    problems: Callable[[Model, Cluster, Plan], Iterator[str]] = _any_plan
    own: Callable[[Plan], dict[str, Any]] = lambda plan: {}

    def problem(self, model: Model, cluster: Cluster, plan: Plan) -> str | None:
        """Why the system cannot run the plan; ``None`` if it can."""
        unused = {"cp_kind": plan.cp == 1, "schedule": plan.pp == 1}
        for name, (values, has) in self.limits.items():
            value = getattr(plan, name)
            if value not in values and not unused.get(name, False):
                return f"{has}, not {name}={str(value).lower() if isinstance(value, bool) else value}"
        return next(self.problems(model, cluster, plan), None)
