"""A training system: the plans that it can run, and the export of a plan."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.software import CURRENT
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan, unchecked
from parallel_ops.planner.schedules.action import WHOLE_BACKWARD

Limits = Mapping[str, tuple[tuple[Any, ...], str]]

# Limits of systems that keep states and activations as PyTorch does, and route tokens to experts without a capacity.
PLAIN_STATES: Limits = {
    "activation_dtype": (("",), "it keeps the inputs of products as they were computed"),
    "moment_dtype": (("fp32",), "its Adam moments are in fp32"),
    "master_bytes": ((4,), "its master weights are in fp32"),
    "inplace_loss": ((False,), "its loss keeps the logits"),
    "recompute_layers": ((0,), "it recomputes all layers or none"),
    "cuda_graph": (("none",), "its host launches the kernels of a step"),
    "offload_layers": ((0,), "it offloads the activations of all layers or of none"),
}
DROPLESS: Limits = {"capacity_factor": ((0,), "its experts compute all tokens")}
PLAIN_EXPERTS: Limits = {
    "expert_tp": ((0,), "its experts have the tensor parallelism of the dense layers"),
    "ep_overlap": ((False,), "its experts wait for their tokens"),
    "dispatcher": (("all_to_all",), "its experts have all-to-alls"),
}


@dataclass(frozen=True, kw_only=True)
class ExportTarget:
    """A training system that plans can be exported to.

    Attributes:
        name: name of the system, as in ``--for`` and ``--format``.
        write: returns the text of a config file or command for a plan that the system can run.
        limits: for some fields of ``Plan``, the supported values and a sentence about them.
        problems: yields reasons beyond ``limits`` why the system cannot run a plan.
        command: the program that torchrun starts, with its arguments; empty if the export is a command itself.
        config: name of the file that the export is; empty if it is arguments of ``command``.
        environment: returns variables that the program needs.
        software: era whose efficiencies a search for this system uses (``compute.software``).
        adapters: why the export cannot have low-rank adapters, of a model with ``lora_rank``; empty if it can.
        hybrids: why the export cannot have layers other than attention and MLPs; empty if it can.
        models: yields reasons why the system cannot train a model, whatever the plan.
        own: returns the system's defaults, as changes to fields of a plan that a user leaves open.
    """

    name: str
    write: Callable[[Model, Cluster, Plan], str]
    command: tuple[str, ...] = ()
    config: str = ""
    environment: Callable[[Cluster, Plan], dict[str, str]] = lambda cluster, plan: {}
    adapters: str = ""
    hybrids: str = ""
    software: str = CURRENT
    limits: Limits = field(default_factory=dict)
    models: Callable[[Model], Iterator[str]] = lambda model: iter(())
    problems: Callable[[Model, Cluster, Plan], Iterator[str]] = lambda model, cluster, plan: iter(())
    own: Callable[[Plan], dict[str, Any]] = lambda plan: {}

    def problem(self, model: Model, cluster: Cluster, plan: Plan) -> str | None:
        """Why the system cannot run the plan; ``None`` if it can."""
        if reason := next(self.models(model), None):
            return reason
        whole_backward = plan.pp > 1 and plan.schedule in WHOLE_BACKWARD
        unused = {"cp_kind": plan.cp == 1, "schedule": plan.pp == 1, "input_grad_first": not whole_backward}
        for name, (values, has) in self.limits.items():
            value = getattr(plan, name)
            if value not in values and not unused.get(name, False):
                return f"{has}, not {name}={str(value).lower() if isinstance(value, bool) else value}"
        return next(self.problems(model, cluster, plan), None)

    def runs(self, model: Model, cluster: Cluster, plan: Plan) -> bool:
        """Whether the system can run the plan, with its own defaults where a plan of another system has others."""
        return self.problem(model, cluster, unchecked(plan, **self.own(plan))) is None
