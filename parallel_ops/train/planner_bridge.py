"""The planner's figures for a run: memory of a rank, time of a step, plans for other numbers of ranks."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from parallel_ops.planner import presets
from parallel_ops.planner.cli import inputs
from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.compute.documents import describe, representative, with_lengths
from parallel_ops.planner.estimate import estimate
from parallel_ops.planner.export.trainer import TRAINER
from parallel_ops.planner.memory.communicators import process_bytes
from parallel_ops.planner.memory.memory import memory
from parallel_ops.planner.memory.states import element_bytes
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.results import GIB, Estimate, StageMemory
from parallel_ops.tensor_parallel.loss.linear_loss import CHUNK_BYTES
from parallel_ops.train.config import Settings
from parallel_ops.train.config_file import settings_of
from parallel_ops.train.planner_model import planner_model

# The GPU that the command line assumes without one.
ASSUMED = "h100"


def model_of(settings: Settings) -> Model:
    """The planner's model of a run."""
    folder = settings.model.dir
    return planner_model(settings.config, settings.seq_length, "model" if folder is None else folder.name)


def counted_plan(settings: Settings) -> Plan:
    """The plan with the capacity of experts, and what ``recompute.offload`` keeps in host memory. The planner's has all
    activations of layers there, which with full recomputation are their inputs; it counts nothing for the inputs of
    others."""
    plan, own, experts = settings.plan, settings.recompute, settings.config.experts
    if experts is not None and experts.capacity_factor:
        plan = replace(plan, capacity_factor=experts.capacity_factor)
    moved = own.offload == "all" or (own.offload == "inputs" and plan.recompute == "full" and own.every == 1)
    offload = {"none": "activations", "optimizer": "optimizer+activations"}.get(plan.offload)
    return replace(plan, offload=offload) if moved and offload else plan


@dataclass(frozen=True)
class Device:
    """The device of each rank: bytes of memory, and whether it is a GPU."""

    name: str
    memory: float
    gpu: bool

    @classmethod
    def here(cls, settings: Settings, ranks: int) -> "Device":
        """This rank's GPU, or this machine's memory divided by ``ranks``."""
        if uses_cuda(settings):
            found = torch.cuda.get_device_properties(torch.cuda.current_device())
            return cls(found.name, float(found.total_memory), True)
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(f"this machine's memory, shared by {ranks} ranks" if ranks > 1 else "this machine's memory",
                   whole / ranks, False)  # fmt: skip


def uses_cuda(settings: Settings) -> bool:
    """True if a run is on GPUs.

    Raises:
        ValueError: The settings require a GPU, and there is none.
    """
    there = torch.cuda.is_available()
    if settings.run.device == "cuda" and not there:
        raise ValueError("run.device is 'cuda', but this torch sees no CUDA GPU")
    return there and settings.run.device != "cpu"


def rank_memory(settings: Settings, *, gpu: bool) -> StageMemory:
    """The planner's memory of each rank, a GPU or a process on CPUs, without Python and torch themselves; of a pipeline
    that of the rank that needs most."""
    model, plan = model_of(settings), counted_plan(settings)
    if gpu:
        own = os.environ.get("PARALLEL_OPS_TRANSPORT") == "nccl"
        stages = memory(model, plan, runtime=process_bytes(plan, own_transport=own))
    else:
        whole = element_bytes(plan) * model.seq_length * plan.micro_batch / plan.cp * model.vocab_size / plan.tp
        stages = memory(model, plan, logit_chunk=min(CHUNK_BYTES["cpu"], whole), runtime=0.0)
    return max(stages, key=lambda stage: stage.total)


def memory_problem(settings: Settings, device: Device) -> str | None:
    """The error of a plan that does not fit in a rank's memory by the planner's count; ``None`` if it fits."""
    found = rank_memory(settings, gpu=device.gpu)
    needed = found.total + (0.0 if device.gpu else found.host)
    if needed <= device.memory:
        return None
    more = (needed - device.memory) / GIB
    states = found.states / GIB
    return (
        f"each rank needs {needed / GIB:.2f} GiB, of which parameters, gradients and optimizer are {states:.2f}, and "
        f"{device.name} has {device.memory / GIB:.2f}: {more:.2f} too much by the planner's count"
    )


def cluster_of(name: str | None, plan: Plan) -> Cluster:
    """The cluster of a name or file (``inputs.cluster``) with as many GPUs as a plan has, unless the name has a number;
    without a name that of the GPU that is here, or ``ASSUMED``.

    Raises:
        ValueError, TypeError, OSError: The name is unknown; the message has the nearest ones. Or no such file.
    """
    found = inputs.cluster(name) if name else presets.cluster(gpu_here() or ASSUMED)
    from_file = name is not None and name.endswith((".json", ".toml"))
    if name and (found.gpus == plan.gpus or (re.fullmatch(r".+x\d+", found.name) and not from_file)):
        return found
    if plan.gpus > found.gpus_per_node and plan.gpus % found.gpus_per_node:
        raise ValueError(f"the plan has {plan.gpus} ranks, which do not fill nodes of {found.gpus_per_node} GPUs")
    return replace(found, gpus=plan.gpus, name=f"{found.gpu.name}x{plan.gpus}")


def gpu_here() -> str | None:
    """The preset of this machine's GPU; ``None`` without a known GPU, or for a part of one."""
    if not torch.cuda.is_available():
        return None
    here = torch.cuda.get_device_properties(0)
    if " MIG " in here.name:  # such as "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
        return None
    name = here.name.lower().replace(" ", "")
    known = [gpu for gpu in presets.gpus() if gpu in presets.clusters() and gpu.partition("-")[0] in name]
    return min(known, key=lambda gpu: abs(presets.gpu(gpu).memory - here.total_memory), default=None)


def forecast(settings: Settings, cluster: Cluster) -> Estimate:
    """The planner's estimate of a step on a cluster.

    Raises:
        ValueError: The plan cannot run there.
    """
    return estimate(model_of(settings), cluster, counted_plan(settings), software=TRAINER.software)


def document_cost(settings: Settings, lengths: NDArray[np.int64]) -> str:
    """What attention over packed documents of these lengths costs, and what groups by length save."""
    some = lengths[:: max(1, len(lengths) >> 16)]
    known = representative(np.clip(some, 1, settings.seq_length).tolist())
    return describe(with_lengths(model_of(settings), known), settings.plan.cp, settings.plan.dp)


def replan(settings: Settings, ranks: int, device: Device) -> Settings:
    """The run on another number of ranks, with the same model and global batch.

    ``pp``, ``tp``, ``cp`` and ``dp_shard`` keep their sizes if the ranks allow it, otherwise ``cp`` is reduced before
    ``tp``, and ``tp`` before ``pp``; ``dp`` takes the remaining ranks. If the plan does not fit in memory, the ZeRO
    stage is raised.

    Raises:
        ValueError: No plan for this number of ranks can run; the message has the tried plans by reason.
    """
    tried: dict[str, dict[str, list[int]]] = {}
    for changes in _candidates(settings.plan, ranks):
        try:
            found = changed(settings, changes)
        except ValueError as error:
            reason: str | None = str(error).removeprefix("plan: ").removeprefix("Plan: ")
        else:
            reason = memory_problem(found, device)
        if reason is None:
            return found
        sizes = ", ".join(f"{name}={changes[name]}" for name in ("pp", "dp", "cp", "tp") if name in changes)
        tried.setdefault(reason, {}).setdefault(sizes, []).append(int(changes["zero"]))
    reasons = [f"{_alternatives(plans)}: {reason}" for reason, plans in tried.items()]
    raise ValueError(f"no plan like {settings.plan.text} runs on {ranks} ranks: {'; '.join(reasons)}")


def _alternatives(plans: dict[str, list[int]]) -> str:
    """Formats sizes with the ZeRO stages that were tried."""
    return " or ".join(f"{sizes}, zero={'/'.join(map(str, stages))}" for sizes, stages in plans.items())


def _candidates(plan: Plan, ranks: int) -> Iterator[dict[str, Any]]:
    """Sizes for a number of ranks, those closest to the plan first."""
    shares = [
        (pp, tp, cp)
        for pp in range(plan.pp, 0, -1)
        for tp in range(plan.tp, 0, -1)
        for cp in range(plan.cp, 0, -1)
        if plan.pp % pp == 0 and plan.tp % tp == 0 and plan.cp % cp == 0 and ranks % (pp * tp * cp) == 0
    ]
    for zero in range(plan.zero, 4):
        for pp, tp, cp in shares:
            dp = ranks // (pp * tp * cp)
            replicas = dp // plan.dp_shard if dp % plan.dp_shard == 0 else 1
            found: dict[str, Any] = {"dp": dp, "dp_replicate": replicas, "tp": tp, "cp": cp, "zero": zero}
            if plan.pp > 1:
                found |= {"pp": pp}
            if pp != plan.pp:
                found |= {"layers_per_chunk": ()}
            if plan.pp > pp == 1:
                found |= {"schedule": "1f1b", "virtual_stages": 1, "input_grad_first": False}
            yield found | ({"sequence_parallel": False} if tp == 1 else {})


def changed(settings: Settings, changes: dict[str, Any]) -> Settings:
    """The settings with changed fields of the plan.

    Raises:
        ValueError: The fields do not fit together.
    """
    given = settings.model_dump(exclude_unset=True)
    return settings_of({**given, "parallel": {**given.get("parallel", {}), **changes}}, "plan")
