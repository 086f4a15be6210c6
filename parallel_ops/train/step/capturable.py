"""Which runs can have CUDA graphs of their steps, or of their layers."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from parallel_ops._internal.gradients.grouped_matmul import one_kernel_for
from parallel_ops.layers.lora import is_of_experts
from parallel_ops.models import Transformer
from parallel_ops.models.lora import chosen, linear_names
from parallel_ops.ops.float8_grouped_linear import one_kernel_for as one_float8_kernel_for
from parallel_ops.pipeline_parallel.link import one_by_one
from parallel_ops.planner.feasibility import SPLIT_BACKWARD
from parallel_ops.train.parallelize_model import PRECISIONS

if TYPE_CHECKING:
    from parallel_ops.train.config import Settings

# Eager steps before a capture. torch's notes ask for a few; FSDP2 finds the order of its prefetches in the first.
WARMUP = 3


def eager_reason(settings: "Settings", model: nn.Module, device: torch.device) -> str | None:
    """The first reason why nothing of a run can be captured, the same on all ranks; ``None`` if something can."""
    layers = settings.run.cuda_graph == "layers"
    reasons = {
        f"it needs a GPU, and this run is on {device.type}": not has_graphs(device),
        "of a model that is no Transformer of this package it is not known what it draws and reads": not isinstance(
            model, Transformer
        ),
        "recompute.offload allocates host memory in each step": settings.recompute.offload != "none",
        "parallel.schedule runs two actions at a time, on two threads": settings.plan.schedule == "dualpipe-v",
    }
    draws = getattr(model, "draws", False)
    reasons |= _reasons_of_layers(settings, draws) if layers else _reasons_of_steps(settings, draws, device)
    return next((reason for reason, applies in reasons.items() if applies), None)


def _reasons_of_steps(settings: "Settings", draws: bool, device: torch.device) -> dict[str, bool]:
    plan = settings.plan
    return {
        "data.document_mask changes the lengths of documents in each step": settings.data.document_mask,
        "dropout draws from seeds of the host, which a graph would repeat": draws,
        "parallel.cp does not divide data.seq_length, so experts have no capacity that is one on all ranks": (
            checked_capacity(settings) is not None and settings.seq_length % plan.cp > 0
        ),
        "the backward of parallel.offload waits for copies to host memory": plan.offload != "none",
        "NCCL_LAUNCH_ORDER_IMPLICIT=1 runs captured messages of a pipeline one by one with drivers before CUDA 12.9": (
            device.type == "cuda" and plan.pp > 1 and one_by_one(captured=True)
        ),
        "logging.trace measures the actions of a step with events": settings.logging.trace is not None,
        "of this precision and these sizes on this GPU, torch computes experts one by one, and the host reads how many "
        "rows each has": _one_by_one_experts(settings, device),
    }


def _one_by_one_experts(settings: "Settings", device: torch.device) -> bool:
    """Whether a matmul of experts, or of their adapters, has no kernel for all of a rank at once."""
    config, precision, lora = settings.config, settings.precision, settings.lora
    if device.type != "cuda" or (experts := config.experts) is None:
        return False
    sizes = [config.hidden_size, experts.ffn_hidden_size]
    if lora is not None and any(map(is_of_experts, chosen(config, linear_names(config), lora.options))):
        sizes.append(lora.options.rank)
    held = experts.num_experts // settings.plan.ep
    if not one_kernel_for(device, PRECISIONS[settings.plan.dtype], sizes, held):
        return True
    recipe = precision.experts or precision.linears
    return recipe != "bf16" and (precision.fp8_emulation or not one_float8_kernel_for(device, recipe))


def _reasons_of_layers(settings: "Settings", draws: bool) -> dict[str, bool]:
    config, documents = settings.config, settings.data.document_mask
    whole = settings.recompute.kind in ("full", "selective")
    experts = all(config.has_experts(number) for number in range(config.num_layers))
    return {
        "parallel.schedule runs the backward of a layer twice, for inputs and for weights": (
            settings.plan.pp > 1 and settings.plan.schedule in SPLIT_BACKWARD
        ),
        "run.compile compiles the hooks of layers with them": settings.run.compile,
        "parallel.cp_groups changes the number of tokens in each step": settings.parallel.cp_groups != "fixed",
        "dropout under recompute.kind reads the state of generators": draws and whole,
        "data.document_mask changes the lengths of documents in each step, and all MLPs are experts": (
            documents and experts
        ),
        "recompute.kind takes whole layers, of which a part alone could be captured": (
            (documents or experts) and whole and settings.recompute.every == 1
        ),
    }


def checked_capacity(settings: "Settings") -> float | None:
    """The capacity factor through which captured steps send to dropless experts of several ranks, else ``None``."""
    experts, shared = settings.config.experts, settings.plan.ep > 1
    dropless = experts is not None and experts.capacity_factor is None
    return settings.run.cuda_graph_capacity if dropless and shared else None


def has_graphs(device: torch.device) -> bool:
    """Whether work on a device can be captured in a CUDA graph."""
    return device.type == "cuda"
