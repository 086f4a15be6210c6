"""Arguments of Megatron-LM's ``pretrain_gpt.py``, one option per line.

On GPUs before Blackwell, Megatron-LM requires ``CUDA_DEVICE_MAX_CONNECTIONS=1`` in the environment for tensor or
context parallelism, and another value for Megatron-FSDP (ZeRO 2 and 3): ``launcher.py`` sets it.

Options: ``megatron/training/arguments.py`` and ``TransformerConfig`` of Megatron Core 0.16 to 0.19.
"""

import shlex
from collections.abc import Iterator
from typing import Any

from parallel_ops.planner.cluster import Cluster
from parallel_ops.planner.export.target import ExportTarget
from parallel_ops.planner.memory.recomputation import recomputed
from parallel_ops.planner.model import Model
from parallel_ops.planner.placement import chunk_layers, leaves_node
from parallel_ops.planner.plan import Plan

Option = tuple[str, ...]
_FP16: Option = ("--fp16",)
_BF16: Option = ("--bf16",)
# Current scaling per tensor: the default, delayed scaling, does not support recomputation of norms and activations.
_RECIPES: dict[str, tuple[Option, ...]] = {
    "fp8": (("--fp8-format", "hybrid"), ("--fp8-recipe", "tensorwise")),
    "fp8_blockwise": (("--fp8-format", "e4m3"), ("--fp8-recipe", "blockwise")),
    "mxfp8": (("--fp8-format", "e4m3"), ("--fp8-recipe", "mxfp8")),
    "nvfp4": (("--fp4-format", "e2m1"), ("--fp4-recipe", "nvfp4")),
}


def _problems(model: Model, cluster: Cluster, plan: Plan) -> Iterator[str]:
    if plan.pp > 1 and plan.zero > 1:
        yield f"its pipeline runs with ZeRO 0 and 1, not {plan.zero}"
    if plan.schedule == "interleaved" and plan.micro_batches % plan.pp:
        yield f"its interleaved schedule needs micro-batches ({plan.micro_batches}) in multiples of pp ({plan.pp})"
    if plan.ep > 1 and plan.tp > 1 and not plan.sequence_parallel:
        yield "its experts with tensor parallelism need sequence parallelism"
    if plan.grad_dtype == "fp16":
        yield f"it accumulates gradients in fp32 or bf16, not {plan.grad_dtype}"
    if plan.offload == "optimizer" and plan.zero != 1:
        yield "it offloads the optimizer of its distributed optimizer, ZeRO 1"
    yield from _memory_problems(model, plan)
    if plan.activation_dtype and plan.dtype not in _RECIPES:
        yield f"it keeps inputs in fp8 for fp8 products only, not {plan.dtype}"
    if plan.moment_dtype != "fp32" and plan.zero != 1:
        yield "its precision-aware optimizer is the distributed one, ZeRO 1"
    yield from _overlap_problems(model, plan)
    if {"full", "moe"} & set(plan.recompute.split("+")) and plan.cuda_graph == "attention":
        yield "it recomputes no layer with a CUDA graph inside"
    if plan.capacity_factor and plan.dispatcher == "deepep":
        yield "its DeepEP pads no experts to a capacity; add dispatcher=all_to_all or hybridep"
    if plan.pp > 1 and plan.tp > 1 and plan.scatter_gather and not plan.sequence_parallel:
        yield "its pipeline splits messages by sequence parallelism alone; add scatter_gather=false"
    graphed = {"none": (), "attention": ("core_attn",), "full": ("core_attn", "mlp", "moe")}[plan.cuda_graph]
    if model.dropout and {*graphed} & {*recomputed(plan.recompute, plan.flash_attention)}:
        yield "its CUDA graphs recompute nothing with dropout"
    if model.experts and model.bias == "all" and plan.expert_shards > 1:
        yield "its experts with biases are not split by tensor parallelism; add expert_tp=1"


def _overlap_problems(model: Model, plan: Plan) -> Iterator[str]:
    if plan.ep_overlap and plan.pp > 1 and plan.schedule != "interleaved":
        yield "it overlaps the all-to-alls of experts in its interleaved schedule"
    if not plan.ep_overlap or plan.ep == 1:
        return
    if {"full", "moe"} & set(plan.recompute.split("+")):
        yield "it overlaps the all-to-alls of experts that it does not recompute"
    if plan.dtype == "fp32":
        yield "it overlaps the all-to-alls of experts in 16 bits, not fp32"
    if plan.pp == 1 and model.prediction_layers:
        # Core 0.16 and 0.17.
        yield "it overlaps the all-to-alls of experts beside multi-token prediction in a pipeline only"


def _models(model: Model) -> Iterator[str]:
    if model.bias == "qkv" and model.latent is not None:
        yield "latent attention has no bias"
    if model.prediction_layers and model.positions != "rotary":
        yield "its multi-token prediction has rotary positions"


def _memory_problems(model: Model, plan: Plan) -> Iterator[str]:
    if plan.recompute in ("operators", "experts"):
        yield f"it recomputes layers or modules, not recompute={plan.recompute}"
    if "mlp_act" in recomputed(plan.recompute, plan.flash_attention) and not (
        model.experts and plan.recompute == "selective"
    ):
        yield "it cannot recompute the activation function of a dense MLP alone; recompute=mlp, none or full"
    if "activations" in plan.offload and (plan.pp > 1 or plan.recompute != "none"):
        yield "it offloads activations without a pipeline and without recomputation"
    if "activations" in plan.offload and not 0 < plan.offload_layers < model.num_layers:
        yield f"it offloads the activations of some layers: offload_layers of 1 to {model.num_layers - 1}"
    if "activations" in plan.offload and plan.cuda_graph != "none":
        yield "it offloads no activations of a CUDA graph"
    if plan.recompute_layers and (plan.recompute != "full" or plan.recompute_layers % (plan.pp * plan.virtual_stages)):
        yield "it recomputes whole layers, the same number in each chunk"


def _own(plan: Plan) -> dict[str, Any]:
    # Transformer Engine keeps the inputs of fp8 matmuls in fp8.
    kept, split = "fp8" if plan.dtype in _RECIPES else "", plan.sequence_parallel or plan.tp == 1
    return {"fused_loss": False, "fsdp": False, "activation_dtype": kept, "scatter_gather": split}


def _write(model: Model, cluster: Cluster, plan: Plan) -> str:
    options = [*_model(model), *_parallelism(model, cluster, plan), *_precision(plan), *_recomputation(model, plan)]
    return " \\\n".join(" ".join(map(shlex.quote, option)) for option in options) + "\n"


def _model(model: Model) -> Iterator[Option]:
    yield from (
        ("--num-layers", str(model.num_layers)),
        ("--hidden-size", str(model.hidden_size)),
        ("--ffn-hidden-size", str(model.ffn_hidden_size)),
        ("--num-attention-heads", str(model.num_heads)),
        ("--seq-length", str(model.seq_length)),
        ("--max-position-embeddings", str(model.seq_length)),
        ("--vocab-size", str(model.vocab_size)),
        ("--position-embedding-type", "rope" if model.positions == "rotary" else "learned_absolute"),
        ("--normalization", "RMSNorm" if model.norm == "rms" else "LayerNorm"),
    )
    if (latent := model.latent) is not None:
        yield ("--multi-latent-attention",)
        if latent.query_rank:
            yield "--q-lora-rank", str(latent.query_rank)
        yield "--kv-lora-rank", str(latent.key_value_rank)
        yield "--qk-head-dim", str(latent.head)
        yield "--qk-pos-emb-head-dim", str(latent.rope_head)
        yield "--v-head-dim", str(latent.value_head)
    else:
        if model.num_kv_heads != model.num_heads:
            yield ("--group-query-attention",)
            yield "--num-query-groups", str(model.num_kv_heads)
        if model.head_dim * model.num_heads != model.hidden_size:
            yield "--kv-channels", str(model.head_dim)
    if any(model.windows):
        yield "--window-size", f"{model.window - 1},0"  # keys before that of the query itself
        if not all(model.windows):
            yield "--window-attn-skip-freq", f"[{','.join(str(int(window > 0)) for window in model.windows)}]"
    yield from [("--mtp-num-layers", str(model.prediction_layers))] if model.prediction_layers else []
    yield from [("--swiglu",)] if model.gated else []
    yield from [("--disable-bias-linear",)] if model.bias != "all" else []
    yield from [("--add-qkv-bias",)] if model.bias == "qkv" else []
    yield from [] if model.tied_embeddings else [("--untie-embeddings-and-output-weights",)]
    yield from [] if model.dropout else [("--attention-dropout", "0"), ("--hidden-dropout", "0")]
    if model.experts:
        yield "--num-experts", str(model.experts)
        yield "--moe-router-topk", str(model.experts_per_token)
        yield "--moe-ffn-hidden-size", str(model.expert_ffn)
        yield ("--moe-grouped-gemm",)
        if model.shared_experts:
            yield "--moe-shared-expert-intermediate-size", str(model.shared_experts * model.expert_ffn)
        if model.dense_layers:
            yield "--moe-layer-freq", f"([0]*{model.dense_layers}+[1]*{model.num_layers - model.dense_layers})"


def _parallelism(model: Model, cluster: Cluster, plan: Plan) -> Iterator[Option]:
    yield "--tensor-model-parallel-size", str(plan.tp)
    yield "--pipeline-model-parallel-size", str(plan.pp)
    yield "--context-parallel-size", str(plan.cp)
    yield "--micro-batch-size", str(plan.micro_batch)
    yield "--global-batch-size", str(plan.global_batch)
    if plan.pp > 1:
        yield from _stages(model, plan)
    if plan.cp > 1:
        yield "--cp-comm-type", "p2p" if plan.cp_kind == "ring" else "a2a"
    if model.experts:
        yield "--expert-model-parallel-size", str(plan.ep)
        # By default, experts have the tensor parallelism of the dense layers.
        if plan.expert_shards != plan.tp:
            yield "--expert-tensor-parallel-size", str(plan.expert_shards)
        yield from _dispatcher(plan)
        yield from [("--overlap-moe-expert-parallel-comm",)] if plan.ep_overlap and plan.ep > 1 else []
        if plan.capacity_factor:
            yield "--moe-expert-capacity-factor", str(plan.capacity_factor)
            yield ("--moe-pad-expert-input-to-capacity",)
        nodes = plan.expert_shards * plan.ep // cluster.node_size
        if model.expert_nodes and leaves_node(cluster, plan, "ep") and nodes > model.expert_nodes:
            yield "--moe-router-num-groups", str(nodes)
            yield "--moe-router-group-topk", str(model.expert_nodes)
    if plan.sequence_parallel:
        yield ("--sequence-parallel",)
        yield from [("--tp-comm-overlap",)] if plan.tp_overlap else []
    if plan.zero:
        yield ("--use-distributed-optimizer",)
    if plan.zero > 1:
        yield ("--use-megatron-fsdp",)
        yield "--data-parallel-sharding-strategy", "optim_grads" if plan.zero == 2 else "optim_grads_params"
        yield "--ckpt-format", "fsdp_dtensor"
        yield ("--no-gradient-accumulation-fusion",)
    if plan.cuda_graph != "none":
        whole = plan.cuda_graph == "full"
        yield "--cuda-graph-impl", "local" if whole else "transformer_engine"
        router = ["moe_router", "moe_preprocess"] if model.experts else []
        yield "--cuda-graph-scope", *(["full_iteration"] if whole else ["attn", *router])
        # The check would read the loss on the host in the middle of the graph.
        yield from [("--no-check-for-nan-in-loss-and-grad",)] if whole else []
        # Core 0.16 and 0.17 ask for it in training, too.
        yield from [("--moe-pad-experts-for-cuda-graph-inference",)] if whole and plan.ep > 1 else []
    if plan.overlap and plan.dp > 1:
        yield ("--overlap-grad-reduce",)
        yield from [("--overlap-param-gather",)] if plan.zero else []


def _dispatcher(plan: Plan) -> Iterator[Option]:
    yield "--moe-token-dispatcher-type", "alltoall" if plan.dispatcher == "all_to_all" else "flex"
    if plan.dispatcher != "all_to_all":
        yield "--moe-flex-dispatcher-backend", plan.dispatcher


def _stages(model: Model, plan: Plan) -> Iterator[Option]:
    sizes = [len(layers) for layers in chunk_layers(model, plan)]
    if len(set(sizes)) > 1:
        # E the embedding, t a layer, m one of multi-token prediction, L the loss; a bar ends a stage.
        stages = ["t" * count if count < 2 else f"t*{count}" for count in sizes]
        yield "--pipeline-model-parallel-layout", f"E{'|'.join(stages)}{'m' * model.prediction_layers}L"
    elif plan.schedule == "interleaved":
        yield "--num-virtual-stages-per-pipeline-rank", str(plan.virtual_stages)


def _precision(plan: Plan) -> Iterator[Option]:
    yield from [("--attention-backend", "flash")] if plan.flash_attention else []
    if plan.dtype != "fp32":
        yield from [_FP16] if plan.dtype == "fp16" else [_BF16, *_RECIPES.get(plan.dtype, ())]
    if plan.dtype != "fp32":
        yield ("--accumulate-allreduce-grads-in-fp32" if plan.grad_dtype == "fp32" else "--grad-reduce-in-bf16",)
    if plan.offload == "optimizer":
        yield ("--optimizer-cpu-offload",)
    if plan.offload == "activations":
        yield "--cpu-offloading-num-layers", str(plan.offload_layers)  # turns it on
    if plan.offload == "optimizer" or plan.moment_dtype == "bf16":
        yield ("--use-precision-aware-optimizer",)
    if plan.moment_dtype == "bf16":
        yield "--exp-avg-dtype", "bf16"
        yield "--exp-avg-sq-dtype", "bf16"
    if plan.inplace_loss:
        # pretrain_gpt.py refuses it since Core 0.18, for its stability; Megatron-Bridge runs it.
        yield ("--cross-entropy-loss-fusion",)
        yield "--cross-entropy-fusion-impl", "te"


def _recomputation(model: Model, plan: Plan) -> Iterator[Option]:
    if plan.recompute == "full":
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "block" if plan.recompute_layers else "uniform"
        yield "--recompute-num-layers", str(max(1, plan.recompute_layers // (plan.pp * plan.virtual_stages)))
    elif plan.recompute != "none":
        named = plan.recompute.split("+") if plan.recompute != "selective" else _modules(model, plan)
        yield "--recompute-granularity", "selective"
        yield "--recompute-modules", *named


def _modules(model: Model, plan: Plan) -> Iterator[str]:
    """Modules of selective recomputation: attention scores or, with FlashAttention, norms and activation functions.

    Megatron-LM recomputes the whole MLP of shared experts, and of the dense layers of a model with experts.
    """
    if not plan.flash_attention:
        yield "core_attn"
        return
    yield "layernorm"
    yield "moe_act"
    yield from ["shared_experts"] if model.shared_experts else []
    yield from ["mlp"] if model.dense_layers else []
    yield from ["mla_up_proj"] if model.latent else []


def _environment(cluster: Cluster, plan: Plan) -> dict[str, str]:
    """Kernels of tensor and context parallelism must start in order before Blackwell, but not with Megatron-FSDP."""
    if cluster.gpu.generation == "blackwell" or plan.tp * plan.cp == 1:
        return {}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "8" if plan.zero > 1 else "1"}


MEGATRON = ExportTarget(
    name="megatron",
    hybrids="pretrain_gpt.py has layers of attention; hybrid ones are a pattern of other scripts",
    adapters="pretrain_gpt.py has no adapters; the recipes of Megatron-Bridge take the same sizes with theirs",
    write=_write,
    command=("pretrain_gpt.py",),
    environment=_environment,
    limits={
        "gather_parameters": ((False,), "Megatron-FSDP gathers layers"),
        "schedule": (("1f1b", "interleaved"), "its pipeline runs 1f1b and interleaved"),
        "offload": (("none", "optimizer", "activations"), "it offloads the optimizer, or activations of some layers"),
        "dp_replicate": ((1,), "it shards over all data-parallel ranks"),
        "fused_loss": ((False,), "its loss comes after the output embedding, as an op of its own"),
        "dtype": (("bf16", "fp16", "fp32", *_RECIPES), "it has no recipe with a scale a row"),
        "moment_dtype": (("fp32", "bf16"), "its Adam moments are in fp32 or bf16"),
        "optimizer_barrier": ((True,), "it waits for the gradient norm of all ranks"),
        "master_bytes": ((4,), "its master weights are in fp32"),
        "input_grad_first": ((False,), "its backward pass sends the gradient of the input at its end"),
    },
    models=_models,
    problems=_problems,
    own=_own,
)
