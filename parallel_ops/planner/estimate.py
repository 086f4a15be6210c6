"""Step time, memory and traffic of one plan.

MFU = FLOPs of the model without recomputation / (step * GPUs * peak)                     arXiv:2205.05198, section
6.3
"""

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.efficiency import Efficiency
from parallel_ops.planner.compute.software import CURRENT, constants_of
from parallel_ops.planner.feasibility import check
from parallel_ops.planner.memory.memory import memory, process_memory
from parallel_ops.planner.memory.recomputation import recomputed
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import recomputed_share
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import Estimate, Transfer
from parallel_ops.planner.rules import broken_rules
from parallel_ops.planner.schedules.schedule import Simulation
from parallel_ops.planner.step import StepTime


def estimate(
    model: Model,
    cluster: Cluster,
    plan: Plan,
    *,
    constants: Efficiency | None = None,
    software: str = CURRENT,
) -> Estimate:
    """Step time, throughput, utilisation, memory and traffic of a plan.

    Args:
        model: the model; ``seq_length`` is the length of a training sequence.
        cluster: the cluster, with as many GPUs as ``plan``.
        plan: the plan. It need not fit in memory: compare ``Estimate.peak_memory`` with the GPU's.
        constants: efficiencies of the hardware; ``None`` for those of the GPU's generation and ``software``.
        software: name of an era (``parallel_ops.planner.compute.software.eras``).

    Raises:
        ValueError: the plan cannot run on this cluster, with the reason.
    """
    check(model, cluster, plan)
    constants = constants or constants_of(cluster, software)
    step = StepTime(model, cluster, plan, constants)
    compute, waits = (part.total * plan.micro_batches for part in step.passes)
    pipeline, gathers, optimizer = step.pipeline(), step.gathers(), step.optimizer()
    outside = step.data_parallel() + step.host()
    bubble = max(0.0, pipeline - compute - waits - gathers)
    seconds = pipeline + outside + optimizer
    tokens = plan.global_batch * model.seq_length
    model_flops = 3.0 * tokens * model.forward_flops
    if model.lora_rank:  # no gradients of frozen weights
        model_flops -= tokens * (model.forward_flops - model.all_attention_flops)
    hardware_flops = model_flops + tokens * recomputed_flops(model, plan)
    stage_ranks = plan.gpus / plan.pp
    peak = sum(gpu.peak(plan.dtype) for gpu in step.gpus) * stage_ranks
    return Estimate(
        model=model,
        cluster=cluster,
        plan=plan,
        memory=memory(model, plan, **process_memory(cluster, plan)),
        transfers=step.transfers(),
        step=seconds,
        compute=compute,
        bubble=bubble,
        exposed=waits + gathers + outside,
        optimizer=optimizer,
        bubble_fraction=bubble / pipeline,
        tokens_per_second=tokens / seconds,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        mfu=model_flops / seconds / peak,
        hfu=hardware_flops / seconds / peak,
        broken_rules=broken_rules(model, cluster, plan, constants),
        cost=cluster.price * plan.gpus * seconds / 3600,
        energy=sum(gpu.watts for gpu in step.gpus) * stage_ranks * seconds,
        software=software,
    )


def simulation(
    model: Model, cluster: Cluster, plan: Plan, *, constants: Efficiency | None = None, software: str = CURRENT
) -> Simulation:
    """The simulated pipeline of a plan, in seconds. Arguments and errors: see ``estimate``."""
    check(model, cluster, plan)
    return StepTime(model, cluster, plan, constants or constants_of(cluster, software)).simulation()


def communication(
    model: Model, cluster: Cluster, plan: Plan, *, constants: Efficiency | None = None, software: str = CURRENT
) -> tuple[Transfer, ...]:
    """Bytes and seconds of a step by group and collective, for one GPU of the slowest stage.

    The formulas are in ``parallel_ops/planner/communication/traffic.py``. Arguments and errors: see ``estimate``.
    """
    check(model, cluster, plan)
    return StepTime(model, cluster, plan, constants or constants_of(cluster, software)).transfers()


def recomputed_flops(model: Model, plan: Plan) -> float:
    """Forward FLOPs per token that are computed a second time."""
    share = recomputed_share(model, plan.recompute_layers)
    if plan.recompute == "full":
        return share * (model.forward_flops - model.head_flops)
    if plan.recompute == "operators":
        return share * (model.forward_flops - model.head_flops - model.all_attention_flops) / 2
    modules, flops = recomputed(plan.recompute, plan.flash_attention), 0.0
    if "core_attn" in modules:
        flops += model.all_attention_flops
    flops += 2 * model.all_layers * model.latent_weights if modules >= {"mla_up_proj"} else 0.0
    flops += 2 * model.mlp_layers * model.mlp_weights if "mlp" in modules else 0.0
    routed = model.experts_per_token * bool(modules & {"moe", "experts"})
    routed += model.shared_experts * bool(modules & {"moe", "shared_experts"})
    return share * (flops + 2 * model.sparse_layers * routed * model.expert_weights)
