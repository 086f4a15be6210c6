"""A plan in the words of the systems that can run it: DeepSpeed, Megatron-LM, torchtitan, torchrun.

What a system cannot do is refused with the reason, rather than left out: a config that runs something else than the
plan is worse than none. What neither the shape nor the plan says (data, learning rate, rotary base, ...) is for the
user to add.

Option names: DeepSpeed's ``runtime/constants.py`` and ``activation_checkpointing/config.py``, Megatron-LM's
``megatron/training/arguments.py`` at commit 000c4ac, torchtitan's ``config/job_config.py`` at commit 6404b93, and
torchrun's ``--help``.
"""

import json
import shlex
from collections.abc import Callable
from typing import Any

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.model import Model
from parallel_ops.planner.plan import Plan

_SPLIT_BACKWARD = ("zb-h1", "zb-2p", "zb-v", "dualpipe-v")


def export(format: str, model: Model, cluster: Cluster, plan: Plan) -> str:
    """The plan as the text of a config file or command.

    Args:
        format: one of ``FORMATS``.

    Raises:
        ValueError: an unknown format, or a plan that the system cannot run.
    """
    if format not in FORMATS:
        raise ValueError(f"export: format must be one of {', '.join(FORMATS)}, got {format!r}")
    return FORMATS[format](model, cluster, plan)


def deepspeed(model: Model, cluster: Cluster, plan: Plan) -> str:
    """A DeepSpeed JSON config.

    Pipeline stages are not part of it: ``PipelineModule(num_stages=...)`` sets them in the training script, and tensor
    and context parallelism come from the ``mpu`` that is passed to ``deepspeed.initialize``. What is recomputed is what
    the model's code passes to ``deepspeed.checkpointing``.
    """
    _refuse(
        "deepspeed",
        (plan.pp > 1 and plan.schedule != "1f1b", f"its pipeline runs 1f1b, not {plan.schedule}"),
        (plan.pp > 1 and plan.zero > 1, f"its pipeline runs with ZeRO 0 and 1, not {plan.zero}"),
        (plan.cp > 1 and plan.cp_kind == "ring", "it has all-to-all context parallelism (Ulysses), not a ring"),
        (plan.dtype == "fp8", "its config has no fp8"),
        (plan.offload != "none" and not plan.zero, "it offloads the optimizer with ZeRO 1 and above"),
        (
            "activations" in plan.offload and plan.recompute != "full",
            "it offloads inputs of recomputed layers alone",
        ),
    )
    zero: dict[str, Any] = {"stage": plan.zero, "overlap_comm": plan.overlap}
    if plan.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        "zero_optimization": zero,
    }
    if plan.dtype != "fp32":
        config[plan.dtype] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": plan.grad_dtype}
    if plan.recompute != "none" or "activations" in plan.offload:
        config["activation_checkpointing"] = {
            "partition_activations": plan.tp > 1,
            "cpu_checkpointing": "activations" in plan.offload,
        }
    return json.dumps(config, indent=2) + "\n"


def megatron(model: Model, cluster: Cluster, plan: Plan) -> str:
    """Arguments of Megatron-LM's ``pretrain_gpt.py``, one option a line."""
    _refuse(
        "megatron",
        (
            plan.pp > 1 and plan.schedule not in ("1f1b", "interleaved"),
            f"its pipeline runs 1f1b and interleaved, not {plan.schedule}",
        ),
        (
            plan.schedule == "interleaved" and plan.micro_batches % plan.pp != 0,
            f"its interleaved schedule needs micro-batches ({plan.micro_batches}) in multiples of pp ({plan.pp})",
        ),
        (plan.pp > 1 and plan.zero > 1, f"its pipeline runs with ZeRO 0 and 1, not {plan.zero}"),
        (plan.grad_dtype in ("fp16", "fp8"), f"it accumulates gradients in fp32 or bf16, not {plan.grad_dtype}"),
        ("activations" in plan.offload, "offloading activations needs choices that a plan does not have"),
        (model.bias == "qkv" and model.latent is not None, "latent attention has no bias"),
    )
    options = [*_megatron_model(model), *_megatron_plan(model, plan)]
    return " \\\n".join(" ".join(map(shlex.quote, option)) for option in options) + "\n"


Option = tuple[str, ...]
_FP16: Option = ("--fp16",)
_BF16: Option = ("--bf16",)
_FP8: Option = ("--fp8-format", "hybrid")


def _megatron_model(model: Model) -> list[Option]:
    options: list[Option] = [
        ("--num-layers", str(model.layers)),
        ("--hidden-size", str(model.hidden)),
        ("--ffn-hidden-size", str(model.ffn)),
        ("--num-attention-heads", str(model.heads)),
        ("--seq-length", str(model.sequence)),
        ("--max-position-embeddings", str(model.sequence)),
        ("--vocab-size", str(model.vocab)),
        ("--position-embedding-type", "rope" if model.positions == "rotary" else "learned_absolute"),
        ("--normalization", "RMSNorm" if model.norm == "rms" else "LayerNorm"),
    ]
    if model.latent is not None:
        latent = model.latent
        options += [
            ("--multi-latent-attention",),
            ("--q-lora-rank", str(latent.query_rank)),
            ("--kv-lora-rank", str(latent.key_value_rank)),
            ("--qk-head-dim", str(latent.head)),
            ("--qk-pos-emb-head-dim", str(latent.rope_head)),
            ("--v-head-dim", str(latent.value_head)),
        ]
    else:
        if model.kv_heads != model.heads:
            options += [("--group-query-attention",), ("--num-query-groups", str(model.kv_heads))]
        if model.head_dim * model.heads != model.hidden:
            options += [("--kv-channels", str(model.head_dim))]
    options += [("--swiglu",)] if model.gated else []
    options += [("--disable-bias-linear",)] if model.bias != "all" else []
    options += [("--add-qkv-bias",)] if model.bias == "qkv" else []
    options += [] if model.tied_embeddings else [("--untie-embeddings-and-output-weights",)]
    options += [] if model.dropout else [("--attention-dropout", "0"), ("--hidden-dropout", "0")]
    if model.experts:
        options += [
            ("--num-experts", str(model.experts)),
            ("--moe-router-topk", str(model.experts_per_token)),
            ("--moe-ffn-hidden-size", str(model.expert_ffn)),
            ("--moe-grouped-gemm",),
        ]
        if model.shared_experts:
            options += [("--moe-shared-expert-intermediate-size", str(model.shared_experts * model.expert_ffn))]
        if model.dense_layers:
            sparse = model.layers - model.dense_layers
            options += [("--moe-layer-freq", f"([0]*{model.dense_layers}+[1]*{sparse})")]
    return options


def _megatron_plan(model: Model, plan: Plan) -> list[Option]:
    options: list[Option] = [
        ("--tensor-model-parallel-size", str(plan.tp)),
        ("--pipeline-model-parallel-size", str(plan.pp)),
        ("--context-parallel-size", str(plan.cp)),
        ("--micro-batch-size", str(plan.micro_batch)),
        ("--global-batch-size", str(plan.global_batch)),
    ]
    layers = plan.layers_per_chunk
    if layers:
        # E the embedding, t a layer, L the loss; a bar ends a stage.
        stages = [f"t*{count}" for count in layers]
        options += [("--pipeline-model-parallel-layout", f"E{'|'.join(stages)}L")]
    elif plan.schedule == "interleaved":
        options += [("--num-virtual-stages-per-pipeline-rank", str(plan.virtual_stages))]
    if plan.cp > 1:
        options += [("--cp-comm-type", "p2p" if plan.cp_kind == "ring" else "a2a")]
    if model.experts:
        options += [("--expert-model-parallel-size", str(plan.ep)), ("--moe-token-dispatcher-type", "alltoall")]
    options += [("--sequence-parallel",)] if plan.sequence_parallel else []
    if plan.zero:
        options += [("--use-distributed-optimizer",)]
    if plan.zero > 1:
        strategy = "optim_grads" if plan.zero == 2 else "optim_grads_params"
        options += [
            ("--use-megatron-fsdp",),
            ("--data-parallel-sharding-strategy", strategy),
            ("--ckpt-format", "fsdp_dtensor"),
            ("--no-gradient-accumulation-fusion",),
        ]
    if plan.overlap and plan.dp > 1:
        options += [("--overlap-grad-reduce",)] + ([("--overlap-param-gather",)] if plan.zero else [])
    if plan.recompute == "selective":
        options += [("--recompute-granularity", "selective")]
    elif plan.recompute == "full":
        options += [
            ("--recompute-granularity", "full"),
            ("--recompute-method", "uniform"),
            ("--recompute-num-layers", "1"),
        ]
    options += [("--optimizer-cpu-offload",)] if plan.offload == "optimizer" else []
    options += [("--attention-backend", "flash")] if plan.flash_attention else []
    options += {"fp16": [_FP16], "bf16": [_BF16], "fp8": [_BF16, _FP8], "fp32": []}[plan.dtype]
    if plan.dtype != "fp32":
        in_fp32 = plan.grad_dtype == "fp32"
        options += [("--accumulate-allreduce-grads-in-fp32" if in_fp32 else "--grad-reduce-in-bf16",)]
    if plan.pp > 1 and plan.tp > 1 and not plan.scatter_gather:
        options += [("--no-scatter-gather-tensors-in-pipeline",)]
    return options


_TORCH_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-h1": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}


def torchtitan(model: Model, cluster: Cluster, plan: Plan) -> str:
    """The parts of a torchtitan TOML config that a plan decides, for the versions that are configured by ``JobConfig``.

    To be merged with what it does not: model flavor, data set, optimizer, checkpoints.
    """
    split = plan.pp > 1 and plan.schedule in _SPLIT_BACKWARD
    _refuse(
        "torchtitan",
        (plan.pp > 1 and plan.schedule not in _TORCH_SCHEDULES, f"it has no {plan.schedule}"),
        (plan.zero == 1, "it shards gradients with the optimizer: ZeRO 0, 2 or 3"),
        # pytorch/pytorch#144530: the hooks of DistributedDataParallel never run where I and W are computed apart.
        (split and plan.zero == 0 and plan.dp > 1, f"{plan.schedule} with replicated parameters loses gradients"),
        # stage_backward_input finds no leaf of the graph among parameters that were resharded after forward.
        (split and plan.zero == 3, f"{plan.schedule} with ZeRO 3 loses gradients; use ZeRO 2"),
        (plan.cp > 1 and plan.cp_kind == "all-to-all", "its context parallelism is a ring"),
        (bool(plan.layers_per_chunk), "uneven stages need names of modules, which a plan does not have"),
        (plan.dtype == "fp16", "it trains in bf16 or fp8"),
        ("activations" in plan.offload, "it offloads parameters and optimizer, not activations"),
        (plan.offload != "none" and plan.zero == 0, "it offloads what FSDP shards: ZeRO 2 or 3"),
        (plan.tp > 1 and not plan.sequence_parallel, "its tensor parallelism includes sequence parallelism"),
    )
    sharded = plan.zero > 0
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if sharded else plan.dp,
        "data_parallel_shard_degree": plan.dp if sharded else 1,
        "fsdp_reshard_after_forward": "always" if plan.zero == 3 else "never",
        "tensor_parallel_degree": plan.tp,
        "context_parallel_degree": plan.cp,
        "pipeline_parallel_degree": plan.pp,
        "expert_parallel_degree": plan.ep,
    }
    if plan.pp > 1:
        parallelism["pipeline_parallel_schedule"] = _TORCH_SCHEDULES[plan.schedule]
        parallelism["pipeline_parallel_microbatch_size"] = plan.micro_batch
        stages = plan.pp * plan.virtual_stages
        if model.layers % stages == 0:
            # The embedding and the head count as no layers.
            parallelism["pipeline_parallel_first_stage_less_layers"] = 0
            parallelism["pipeline_parallel_last_stage_less_layers"] = 0
            parallelism["pipeline_parallel_layers_per_stage"] = model.layers // stages
    sections: dict[str, dict[str, Any]] = {
        "training": {
            # A pipeline takes all its micro-batches in one batch; without one, the rest is gradient accumulation.
            "local_batch_size": plan.micro_batch * (plan.micro_batches if plan.pp > 1 else 1),
            "global_batch_size": plan.global_batch,
            "seq_len": model.sequence,
            "mixed_precision_param": "float32" if plan.dtype == "fp32" else "bfloat16",
            "mixed_precision_reduce": "float32",
            "enable_cpu_offload": plan.offload != "none",
        },
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": plan.recompute, "selective_ac_option": "op"},
    }
    if plan.dtype == "fp8":
        sections["model"] = {"converters": ["float8"]}
    blocks = ("\n".join([f"[{name}]", *map(_toml, section.items())]) for name, section in sections.items())
    return "\n\n".join(blocks) + "\n"


def torchrun(model: Model, cluster: Cluster, plan: Plan) -> str:
    """A torchrun command, to be run on every node, and the mesh that the script builds."""
    per_node = min(plan.gpus, cluster.gpus_per_node)
    sizes = ", ".join(f"{name}={getattr(plan, name)}" for name in ("pp", "dp", "cp", "tp", "ep"))
    nodes = -(-plan.gpus // per_node)
    if plan.gpus % per_node:
        raise ValueError(f"export: torchrun: {plan.gpus} GPUs do not fill nodes of {per_node}")
    rendezvous = ["--standalone"] if nodes == 1 else ["--rdzv-backend=c10d", '--rdzv-endpoint="$MASTER_ADDR:29500"']
    command = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={per_node}", *rendezvous, "train.py"]
    return f"# In train.py: mesh = parallel_ops.ParallelMesh({sizes})\n{' '.join(command)}\n"


FORMATS: dict[str, Callable[[Model, Cluster, Plan], str]] = {
    "deepspeed": deepspeed,
    "megatron": megatron,
    "torchtitan": torchtitan,
    "torchrun": torchrun,
}


def _refuse(system: str, *reasons: tuple[bool, str]) -> None:
    for wrong, reason in reasons:
        if wrong:
            raise ValueError(f"export: {system} cannot run this plan: {reason}")


def _toml(item: tuple[str, Any]) -> str:
    # Strings, numbers, booleans and lists of strings are written the same in TOML and in JSON.
    name, value = item
    return f"{name} = {json.dumps(value)}"
