"""A DeepSpeed JSON config.

It does not contain pipeline stages, which the training script sets by ``PipelineModule(num_stages=...)``; tensor and
sequence parallelism, which come from the ``mpu`` of ``deepspeed.initialize``; and the recomputed modules, which the
model's code passes to ``deepspeed.checkpointing``.

Keys: DeepSpeed 0.19, ``runtime/constants.py``, ``runtime/zero/config.py`` and ``activation_checkpointing/config.py``.
"""

import json
from collections.abc import Iterator
from typing import Any

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.export.target import DROPLESS, PLAIN_EXPERTS, PLAIN_STATES, ExportTarget
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan


def _problems(model: Model, cluster: Cluster, plan: Plan) -> Iterator[str]:
    if plan.pp > 1 and plan.zero > 1:
        yield f"its pipeline runs with ZeRO 0 and 1, not {plan.zero}"
    if plan.ep > 1 and plan.zero == 3:
        # DeepSpeedEngine._validate_zero3_moe_compatibility; AutoEP has keys of its own.
        yield "its MoE layers run with ZeRO 0 to 2"
    if plan.layers_per_chunk:
        yield "PipelineModule divides the layers itself; it takes no number of layers per stage"
    if plan.zero == 0 and plan.grad_dtype != plan.dtype:
        # DeepSpeedEngine._do_optimizer_sanity_check: "unsupported mix"
        yield f"without ZeRO it accumulates gradients in {plan.dtype}; add grad_dtype={plan.dtype}, or zero=1"
    if "optimizer" in plan.offload and not plan.zero:
        yield "it offloads the optimizer with ZeRO 1 and above"
    if "activations" in plan.offload and plan.recompute != "full":
        yield "it offloads only the inputs of recomputed layers; add recompute=full"


def _own(plan: Plan) -> dict[str, Any]:
    own = {"fused_loss": False, "fsdp": False, "gather_parameters": True}
    return own if plan.zero else {**own, "grad_dtype": plan.dtype}


def _write(model: Model, cluster: Cluster, plan: Plan) -> str:
    zero: dict[str, Any] = {"stage": plan.zero, "overlap_comm": plan.overlap}
    if "optimizer" in plan.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if "parameters" in plan.offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        "zero_optimization": zero,
    }
    if plan.cp > 1:
        config["sequence_parallel_size"] = plan.cp
    if plan.dtype != "fp32":
        config[plan.dtype] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": plan.grad_dtype}
    if plan.recompute != "none":
        config["activation_checkpointing"] = {
            "partition_activations": plan.tp > 1,
            "cpu_checkpointing": "activations" in plan.offload,
        }
    return json.dumps(config, indent=2) + "\n"


DEEPSPEED = ExportTarget(
    name="deepspeed",
    write=_write,
    command=("train.py", "--deepspeed_config", "deepspeed.json"),
    config="deepspeed.json",
    limits={
        **PLAIN_STATES,
        **PLAIN_EXPERTS,
        **DROPLESS,
        "schedule": (("1f1b",), "its pipeline runs 1f1b"),
        "cp_kind": (("all_to_all",), "it has all-to-all context parallelism (Ulysses)"),
        "recompute": (("none", "full"), "it recomputes whole layers"),
        "dtype": (("bf16", "fp16", "fp32"), "its config has bf16, fp16 and fp32"),
        "fused_loss": ((False,), "its config has no fused loss"),
        "dp_replicate": ((1,), "it shards over all data-parallel ranks"),
        "optimizer_barrier": ((True,), "it waits for the gradient norm of all ranks"),
        "input_grad_first": ((False,), "its backward pass sends the gradient of the input at its end"),
    },
    problems=_problems,
    software="deepspeed-2024",
    own=_own,
)
