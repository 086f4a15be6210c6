"""A TOML file for ``parallel-ops train`` with the model's shape and the plan.

Other keys have the trainer's defaults, or a comment about what to fill in.
"""

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.export.target import PLAIN_EXPERTS, PLAIN_STATES, ExportTarget
from parallel_ops.planner.feasibility import pipeline_problems
from parallel_ops.planner.model import LatentAttention, Model
from parallel_ops.planner.plan import Plan
from parallel_ops.planner.precision import FORMATS, stored
from parallel_ops.planner.presets.figures import figures
from parallel_ops.planner.schedules.action import WHOLE_BACKWARD

# What the sizes of weights must be multiples of: ``parallel_ops.ops.float8_recipes``, which imports torch.
_MULTIPLES = {"fp8_rowwise": 16, "fp8_blockwise": 128, "mxfp8": 32}


def sharding_problems(plan: Plan) -> Iterator[tuple[str, str]]:
    """Fields of a plan that the trainer's sharding by FSDP2 does not allow, each with the reason."""
    shards = plan.dp_shard * plan.cp
    if plan.ep > 1 and shards == 1 and plan.ep != plan.tp:
        yield "ep", f"must be tp ({plan.tp}) where dp_shard and cp are 1, got {plan.ep}"
    if plan.ep > 1 and plan.dp_replicate > 1 and (not plan.zero or shards == 1):
        need = "zero of 1 or more, and dp_shard * cp of 2 or more"
        yield "ep", f"with dp_replicate needs {need}: replicas of experts are shards"
    if plan.offload != "none" and not plan.zero:
        yield "offload", "needs zero of 1 or more: FSDP2 offloads shards"
    elif plan.offload != "none" and shards == 1:
        yield "offload", "needs dp_shard * cp of 2 or more: FSDP2 offloads shards"


def _problems(model: Model, cluster: Cluster, plan: Plan) -> Iterator[str]:
    if model.experts and plan.expert_shards > 1:
        yield "its experts are not split by tensor parallelism; add expert_tp=1"
    yield from (f"its {key} {reason}" for key, reason in sharding_problems(plan))
    if model.lora_rank and plan.dtype in FORMATS:
        yield f"its adapters are in 16 bits, not {plan.dtype}"
    multiple = _MULTIPLES.get(plan.dtype, 1)
    if size := next((size for size in _sizes(model, plan.tp) if size % multiple), 0):
        yield f"its {plan.dtype} takes multiples of {multiple}, not the {size:g} of a linear on each rank of tp"
    if plan.pp > 1 and plan.schedule in WHOLE_BACKWARD and not plan.input_grad_first:
        yield "its backward pass sends the gradient of the input first; add input_grad_first=true"
    yield from (found.reason for found in pipeline_problems(model, plan, plan.recompute))


def _sizes(model: Model, tp: int) -> Iterator[float]:
    """Inputs and outputs of linears on a tensor-parallel rank, and of experts."""
    yield model.hidden_size
    yield model.value_width / tp
    if m := model.latent:
        yield from (m.query_rank, m.key_value_rank)
        yield from (model.query_width / tp, model.num_heads * (m.head + m.value_head) / tp)
    else:
        yield model.num_kv_heads / min(tp, model.num_kv_heads) * model.head_dim  # at least one head a rank
    if model.experts:
        yield from (model.expert_ffn, model.shared_experts * model.expert_ffn / tp)
    if model.dense_layers > 1 or not model.experts:  # the first layer and the last stay in 16 bits
        yield model.ffn_hidden_size / tp


def _models(model: Model) -> Iterator[str]:
    if model.hybrid:
        yield f"this package cannot train layers of the kind {', '.join(model.hybrid)}"
    if model.attention_gate or model.residual_streams > 1:
        yield "this package cannot train gated attention and hyper-connections"
    if model.latent and (model.bias != "none" or model.positions != "rotary"):
        yield "its latent attention has rotary positions and no biases"
    if model.lora_rank and (model.experts or model.latent):
        yield "its adapters are for dense models without latent attention"
    if model.frozen != "16bit":
        yield f"its frozen weights are not {model.frozen}"
    if model.experts and not model.gated:
        yield "its experts have gated activations"
    if model.experts and model.bias == "all":
        yield "its experts have no biases"


def _write(model: Model, cluster: Cluster, plan: Plan) -> str:
    elsewhere = {"dtype", "recompute", "capacity_factor", "fused_loss"}  # the loss is fused
    changed = {f.name: getattr(plan, f.name) for f in fields(Plan) if getattr(plan, f.name) != f.default}
    sections: dict[str, dict[str, Any]] = {
        "run": {"steps": 1000},
        "model": _shape(model),
        **({"model.latent": _latent(model.latent)} if model.latent else {}),
        **({"model.experts": _experts(model, plan)} if model.experts else {}),
        # Tokens of two bytes, the default, are too small for large vocabularies.
        "data": {"paths": ["tokens.bin"]} | ({"dtype": "uint32"} if model.vocab_size > 2**16 else {}),
        **({"lora": {"rank": model.lora_rank, "alpha": 2.0 * model.lora_rank}} if model.lora_rank else {}),
        "optimizer": {"lr": 3e-4},
        "parallel": {name: value for name, value in changed.items() if name not in elsewhere},
        "precision": {"dtype": stored(plan.dtype)} | ({"linears": plan.dtype} if plan.dtype in FORMATS else {}),
        "recompute": {"kind": plan.recompute},
        "checkpoint": {"dir": "checkpoints", "interval": 100},
        "logging": {"jsonl": "metrics.jsonl"},
    }
    notes = {
        "model.experts": "add score, groups, selection_bias and the rest of the router, or dir in [model]",
        "model": f"{model.name}; rotary_base and norm_eps are not in its shape: add them, or dir in its place",
        "data": "token files, or folders of them",
        "lora": "add dir in [model]: the weights that stay frozen",
        "optimizer": "a plan does not choose it: schedule, warmup and the rest have their defaults",
    }
    # Strings, numbers, booleans and lists are written the same in TOML and in JSON.
    blocks = (
        "\n".join(
            [f"[{name}]" + (f"  # {notes[name]}" if name in notes else "")]
            + [f"{key} = {json.dumps(value)}" for key, value in section.items()]
        )
        for name, section in sections.items()
    )
    return f"# {plan.describe()}\n\n" + "\n\n".join(blocks) + "\n"


def _shape(model: Model) -> dict[str, Any]:
    """The fields of ``TransformerConfig``."""
    heads = () if model.latent else ("num_kv_heads", "head_dim")
    sizes = ("vocab_size", "seq_length", "num_layers", "hidden_size", "num_heads", *heads, "ffn_hidden_size")
    shape: dict[str, Any] = {
        **{name: getattr(model, name) for name in sizes},
        "activation": "swiglu" if model.gated else "gelu",
        "norm": "rms_norm" if model.norm == "rms" else "layer_norm",
        "bias": model.bias == "all",
        "qkv_bias": model.bias != "none",
        "positions": model.positions,
        "tied_embeddings": model.tied_embeddings,
    }
    if any(model.windows):
        shape["window"] = model.window if all(model.windows) else [window or "none" for window in model.windows]
    if model.prediction_layers:
        shape["prediction_layers"] = model.prediction_layers
    return shape | ({"dropout": 0.1, "attention_dropout": 0.1} if model.dropout else {})


def _latent(latent: LatentAttention) -> dict[str, Any]:
    """The fields of ``LatentAttentionConfig``, whose names are those of Hugging Face."""
    names = figures("presets/huggingface")["mixers"]["latent"]
    query = {"q_lora_rank": latent.query_rank} if latent.query_rank else {}
    return query | {name: getattr(latent, field) for field, name in names.items()}


def _experts(model: Model, plan: Plan) -> dict[str, Any]:
    """The fields of ``ExpertsConfig``."""
    return {
        "num_experts": model.experts,
        "top_k": model.experts_per_token,
        "ffn_hidden_size": model.expert_ffn,
        "shared_experts": model.shared_experts,
        "dense_layers": model.dense_layers,
        **({"capacity_factor": plan.capacity_factor} if plan.capacity_factor else {}),
    }


TRAINER = ExportTarget(
    name="parallel_ops",
    write=_write,
    command=("-m", "parallel_ops", "train", "run.toml"),
    config="run.toml",
    limits={
        **PLAIN_STATES,
        **PLAIN_EXPERTS,
        "expert_tp": ((0, 1), "its experts are not split by tensor parallelism"),
        "dtype": (
            ("bf16", "fp16", "fp32", "fp8_rowwise", "fp8_blockwise", "mxfp8"),
            "its products are bf16, fp16, fp32, fp8_rowwise, fp8_blockwise or mxfp8",
        ),
        "offload": (("none", "optimizer"), "its trainer offloads the optimizer"),
        "recompute": (
            ("none", "selective", "full", "experts"),
            "it recomputes layers, experts, or norms and activation functions",
        ),
        "grad_dtype": (("fp32",), "its trainer reduces gradients in fp32"),
        "flash_attention": ((True,), "its attention stores no scores"),
        "fused_ops": ((True,), "its layers are fused ops"),
        "fused_loss": ((True,), "its loss is one op with the output embedding"),
        "fsdp": ((True,), "its shards are FSDP2's"),
        "gather_parameters": ((False,), "FSDP2 gathers layers"),
        "overlap": ((True,), "its communication runs beside computation"),
        "optimizer_barrier": ((True,), "its trainer waits for the gradient norm of all ranks"),
    },
    models=_models,
    problems=_problems,
    software="parallel_ops",
    own=lambda plan: {"fused_loss": True, "input_grad_first": plan.pp > 1},
)
