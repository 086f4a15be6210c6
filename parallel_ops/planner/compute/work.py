"""What the time of a layer depends on, and the times of its passes."""

from operator import attrgetter
from typing import NamedTuple

from parallel_ops.planner.plan import Plan


class PassTimes(NamedTuple):
    """Seconds of the passes F, I and W of one micro-batch."""

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def total(self) -> float:
        """F + I + W."""
        return self.forward + self.input_grad + self.weight_grad

    def __add__(self, other: "PassTimes") -> "PassTimes":  # type: ignore[override]
        return PassTimes(
            self.forward + other.forward, self.input_grad + other.input_grad, self.weight_grad + other.weight_grad
        )

    def times(self, factor: float) -> "PassTimes":
        """All three, multiplied by ``factor``."""
        return PassTimes(self.forward * factor, self.input_grad * factor, self.weight_grad * factor)


class Work(NamedTuple):
    """The fields of a plan that determine the time of a layer. Plans that share them share cached results.

    Attributes:
        alone: no other rank has the same parameters.
        grad_bytes: of an accumulated gradient.
    """

    tp: int
    cp: int
    ep: int
    expert_shards: int
    fsdp: bool
    micro_batch: int
    sequence_parallel: bool
    cp_kind: str
    recompute: str
    recompute_layers: int
    dtype: str
    flash_attention: bool
    fused_ops: bool
    inplace_loss: bool
    fused_loss: bool
    tp_overlap: bool
    capacity_factor: float
    cuda_graph: str
    dispatcher: str
    alone: bool
    grad_bytes: int


# All but ``alone`` and ``grad_bytes``, which a plan does not have.
_of_plan = attrgetter(*Work._fields[:-2])


def work_of(plan: Plan) -> Work:
    """The ``Work`` of a plan."""
    grad_bytes = 4 if "fp32" in (plan.grad_dtype, plan.dtype) else 2
    return Work._make((*_of_plan(plan), plan.dp * plan.cp == 1, grad_bytes))
