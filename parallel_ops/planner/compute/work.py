"""What the time of a layer depends on, and the times of its passes."""

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
    """

    tp: int
    cp: int
    ep: int
    expert_shards: int
    fsdp: bool
    alone: bool
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
    grad_bytes: int
    tp_overlap: bool
    capacity_factor: float
    cuda_graph: str
    dispatcher: str


def work_of(plan: Plan) -> Work:
    """The ``Work`` of a plan."""
    return Work(
        tp=plan.tp,
        cp=plan.cp,
        ep=plan.ep,
        expert_shards=plan.expert_shards,
        fsdp=plan.fsdp,
        alone=plan.dp * plan.cp == 1,
        micro_batch=plan.micro_batch,
        sequence_parallel=plan.sequence_parallel,
        cp_kind=plan.cp_kind,
        recompute=plan.recompute,
        recompute_layers=plan.recompute_layers,
        dtype=plan.dtype,
        flash_attention=plan.flash_attention,
        fused_ops=plan.fused_ops,
        inplace_loss=plan.inplace_loss,
        fused_loss=plan.fused_loss,
        grad_bytes=4 if "fp32" in (plan.grad_dtype, plan.dtype) else 2,
        tp_overlap=plan.tp_overlap,
        capacity_factor=plan.capacity_factor,
        cuda_graph=plan.cuda_graph,
        dispatcher=plan.dispatcher,
    )
