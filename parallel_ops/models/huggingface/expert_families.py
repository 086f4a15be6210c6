"""Hugging Face's names for the families with experts, and the table of all families."""

from dataclasses import replace

from parallel_ops.models.config import TransformerConfig
from parallel_ops.models.experts import ExpertsConfig
from parallel_ops.models.huggingface.families import (
    DENSE,
    LLAMA,
    LLAMA_ALWAYS,
    LLAMA_DEFAULTS,
    LLAMA_NAMES,
    LLAMA_TENSORS,
    Family,
    TensorMapping,
    kinds_of,
    windows_of,
)
from parallel_ops.models.huggingface.rotary import Options, read_rotary, write_rotary
from parallel_ops.models.latent import LatentAttentionConfig


def _experts_at(mlp: str, gate: str, up: str, down: str, router: str = "gate") -> dict[str, TensorMapping]:
    """Tensors of a layer with experts, whose MLP has this name in the files."""
    names = {kind: f"model.layers.{{}}.{mlp}.experts.{{}}.{kind}.weight" for kind in (gate, up, down)}
    return {
        "layers.{}.mlp.router.weight": TensorMapping(f"model.layers.{{}}.{mlp}.{router}.weight"),
        "layers.{}.mlp.experts.gate_up": TensorMapping(f"{names[gate]} {names[up]}", parts=2),
        "layers.{}.mlp.experts.down": TensorMapping(names[down]),
    }


def _balance(options: Options) -> Options:
    """Fields of the auxiliary loss, which transformers adds where ``output_router_logits`` is set."""
    options.pop("output_router_logits", None)
    return {"aux_loss": options.pop("router_aux_loss_coef", 0.001), "aux_loss_over": "model"}


def _experts_of(config: TransformerConfig) -> ExpertsConfig:
    if config.experts is None:
        raise ValueError("has no experts")
    return config.experts


def _write_router(experts: ExpertsConfig) -> Options:
    """The keys that all families but DeepSeek's have."""
    return {"num_experts_per_tok": experts.top_k, "router_aux_loss_coef": experts.aux_loss}


def _read_mixtral(options: Options) -> Options:
    experts = ExpertsConfig(
        num_experts=options.pop("num_local_experts", 8),
        top_k=options.pop("num_experts_per_tok", 2),
        ffn_hidden_size=options["intermediate_size"],
        **_balance(options),
    )
    window = options.pop("sliding_window", None)
    return read_rotary(options) | {"experts": experts, "window": window}


def _write_mixtral(config: TransformerConfig) -> Options:
    experts = _experts_of(config)
    return (
        write_rotary(config)
        | _write_router(experts)
        | {
            "num_local_experts": experts.num_experts,
            "sliding_window": config.windows[0],
        }
    )


def _read_qwen3_moe(options: Options) -> Options:
    layers = options["num_hidden_layers"]
    dense = options.pop("mlp_only_layers", None) or []
    if options.pop("decoder_sparse_step", 1) != 1 or sorted(dense) != list(range(len(dense))) or len(dense) >= layers:
        raise ValueError("has layers without experts behind layers with experts, which is not supported")
    if options.pop("use_sliding_window", False):
        raise ValueError("has use_sliding_window, which is not supported for this family")
    options.pop("sliding_window", None)
    options.pop("max_window_layers", None)
    count = options.pop("num_local_experts", None)
    count = options.pop("num_experts", count)
    experts = ExpertsConfig(
        num_experts=128 if count is None else count,
        top_k=options.pop("num_experts_per_tok", 8),
        ffn_hidden_size=options.pop("moe_intermediate_size", 768),
        normalize=options.pop("norm_topk_prob", False),
        dense_layers=len(dense),
        **_balance(options),
    )
    return read_rotary(options) | {"experts": experts}


def _write_qwen3_moe(config: TransformerConfig) -> Options:
    experts = _experts_of(config)
    return (
        write_rotary(config)
        | _write_router(experts)
        | {
            "num_experts": experts.num_experts,
            "moe_intermediate_size": experts.ffn_hidden_size,
            "norm_topk_prob": experts.normalize,
            "mlp_only_layers": list(range(experts.dense_layers)),
            "decoder_sparse_step": 1,
        }
    )


def _read_olmoe(options: Options) -> Options:
    experts = ExpertsConfig(
        num_experts=options.pop("num_experts", 64),
        top_k=options.pop("num_experts_per_tok", 8),
        ffn_hidden_size=options["intermediate_size"],
        normalize=options.pop("norm_topk_prob", False),
        **_balance(options),
    )
    return read_rotary(options) | {"experts": experts}


def _write_olmoe(config: TransformerConfig) -> Options:
    experts = _experts_of(config)
    return (
        write_rotary(config)
        | _write_router(experts)
        | {
            "num_experts": experts.num_experts,
            "norm_topk_prob": experts.normalize,
        }
    )


def _read_gpt_oss(options: Options) -> Options:
    layers, top_k = options["num_hidden_layers"], options.pop("num_experts_per_tok", 4)
    if (again := options.pop("experts_per_token", top_k)) != top_k:
        raise ValueError(f"has num_experts_per_tok {top_k} and experts_per_token {again}, which must be equal")
    options.pop("initial_context_length", None)  # that of rope_scaling, which is read
    experts = ExpertsConfig(
        num_experts=options.pop("num_local_experts", 128),
        top_k=top_k,
        ffn_hidden_size=options["intermediate_size"],
        top_k_first=True,
        router_bias=True,
        bias=True,
        swiglu_alpha=options.pop("swiglu_alpha", 1.702),
        swiglu_limit=options.pop("swiglu_limit", 7.0),
        swiglu_up_offset=1.0,
        **_balance(options),
    )
    if not (options.get("rope_parameters") or options.get("rope_scaling")):
        options["rope_scaling"] = dict(_GPT_OSS_ROPE)
    options.setdefault("rope_theta", 150_000.0)
    window, kinds = options.pop("sliding_window", 128), options.pop("layer_types", None)
    kinds = kinds_of(layer % 2 == 0 for layer in range(layers)) if kinds is None else kinds
    return read_rotary(options) | {"experts": experts, "window": windows_of(kinds, layers, window)}


def _write_gpt_oss(config: TransformerConfig) -> Options:
    experts, rope = _experts_of(config), write_rotary(config)
    if config.rotary_scaling is None:  # without this key it would be the family's default
        rope["rope_scaling"] = {"rope_type": "default"}
    return (
        rope
        | _write_router(experts)
        | {
            "num_local_experts": experts.num_experts,
            "swiglu_alpha": experts.swiglu_alpha,
            "swiglu_limit": experts.swiglu_limit,
            "sliding_window": next((window for window in config.windows if window is not None), 128),
            "layer_types": kinds_of(window is not None for window in config.windows),
        }
    )


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GPT_OSS_TENSORS = {
    "attention.sink": TensorMapping("self_attn.sinks"),
    "mlp.router.weight": TensorMapping("mlp.router.weight"),
    "mlp.router.bias": TensorMapping("mlp.router.bias"),
    "mlp.experts.gate_up": TensorMapping("mlp.experts.gate_up_proj", transposed=True, stacked=True, interleaved=True),
    "mlp.experts.gate_up_bias": TensorMapping("mlp.experts.gate_up_proj_bias", stacked=True, interleaved=True),
    "mlp.experts.down": TensorMapping("mlp.experts.down_proj", transposed=True, stacked=True),
    "mlp.experts.down_bias": TensorMapping("mlp.experts.down_proj_bias", stacked=True),
}


def _read_deepseek(options: Options) -> Options:
    heads = options["num_attention_heads"]
    if (count := options.pop("num_key_value_heads", heads)) != heads:
        raise ValueError(f"has num_key_value_heads {count!r}; latent attention has as many as num_attention_heads")
    if options.pop("scoring_func", "sigmoid") != "sigmoid" or options.pop("topk_method", "noaux_tc") != "noaux_tc":
        raise ValueError("has a scoring_func or topk_method that is not DeepSeek-V3's")
    if options.pop("moe_layer_freq", 1) != 1:
        raise ValueError("has layers without experts behind layers with experts, which is not supported")
    latent = LatentAttentionConfig(
        q_lora_rank=options.pop("q_lora_rank", 1536),
        kv_lora_rank=options.pop("kv_lora_rank", 512),
        qk_nope_head_dim=options.pop("qk_nope_head_dim", 128),
        qk_rope_head_dim=options.pop("qk_rope_head_dim", 64),
        v_head_dim=options.pop("v_head_dim", 128),
        interleaved=options.pop("rope_interleave", True),
    )
    dense = options.pop("first_k_dense_replace", 3)
    experts = ExpertsConfig(
        num_experts=options.pop("n_routed_experts", 256),
        top_k=options.pop("num_experts_per_tok", 8),
        ffn_hidden_size=options.pop("moe_intermediate_size", 2048),
        shared_experts=options.pop("n_shared_experts", 1),
        dense_layers=dense,
        score="sigmoid",
        normalize=options.pop("norm_topk_prob", True),
        scale=options.pop("routed_scaling_factor", 2.5),
        groups=options.pop("n_group", 8),
        top_groups=options.pop("topk_group", 4),
        selection_bias=True,
    )
    further = options.pop("num_nextn_predict_layers", None) or 0
    for key in ("head_dim", "qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha"):
        options.pop(key, None)
    options.pop("output_router_logits", None)
    return read_rotary(options) | {"latent": latent, "experts": experts, "prediction_layers": further}


def _write_deepseek(config: TransformerConfig) -> Options:
    experts, latent = _experts_of(config), config.latent
    if latent is None:
        raise ValueError("has no latent attention")
    return write_rotary(config) | {
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.qk_nope_head_dim,
        "qk_rope_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "rope_interleave": latent.interleaved,
        "num_key_value_heads": config.num_heads,
        "first_k_dense_replace": experts.dense_layers,
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ffn_hidden_size,
        "n_shared_experts": experts.shared_experts,
        "norm_topk_prob": experts.normalize,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.groups,
        "topk_group": experts.top_groups,
        "num_nextn_predict_layers": config.prediction_layers,
    }


_DEEPSEEK_LAYER = {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv": "self_attn.kv_b_proj",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
    "norm_embedding": "enorm",  # of layers that predict further tokens, as the next three
    "norm_hidden": "hnorm",
    "projection": "eh_proj",
    "norm": "shared_head.norm",
}
_DEEPSEEK_TENSORS = (
    LLAMA_TENSORS
    | _experts_at("mlp", "gate_proj", "up_proj", "down_proj")
    | {
        f"layers.{{}}.{ours}.weight": TensorMapping(f"model.layers.{{}}.{theirs}.weight")
        for ours, theirs in _DEEPSEEK_LAYER.items()
    }
    | {"layers.{}.mlp.router.selection_bias": TensorMapping("model.layers.{}.mlp.gate.e_score_correction_bias")}
)


def deepseek(compressed: bool) -> Family:
    """DeepSeek-V3, whose queries are compressed in most models."""
    q = "self_attn.q_b_proj" if compressed else "self_attn.q_proj"
    return replace(
        LLAMA,
        architecture="DeepseekV3ForCausalLM",
        names={ours: theirs for ours, theirs in LLAMA_NAMES.items() if ours not in ("head_dim", "num_kv_heads")},
        defaults=LLAMA_DEFAULTS,
        fixed={"hidden_act": "silu", "attention_bias": False},
        always=LLAMA_ALWAYS,
        read=_read_deepseek,
        write=_write_deepseek,
        tensors=_DEEPSEEK_TENSORS | {"layers.{}.attention.q.weight": TensorMapping(f"model.layers.{{}}.{q}.weight")},
        constants=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        copies={"embed_tokens.weight": "tokens.weight", "shared_head.head.weight": "head.weight"},
    )


# Of several families that have a configuration, the first is written.
FAMILIES = DENSE | {
    "mixtral": replace(
        LLAMA,
        architecture="MixtralForCausalLM",
        defaults=LLAMA_DEFAULTS | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        fixed={"hidden_act": "silu", "router_jitter_noise": 0.0},
        read=_read_mixtral,
        write=_write_mixtral,
        tensors=LLAMA_TENSORS | _experts_at("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "qwen3_moe": replace(
        LLAMA,
        architecture="Qwen3MoeForCausalLM",
        defaults=LLAMA_DEFAULTS | {"num_key_value_heads": 4},
        fixed={"hidden_act": "silu", "attention_bias": False},
        always=LLAMA_ALWAYS | {"qk_norm": True},
        read=_read_qwen3_moe,
        write=_write_qwen3_moe,
        tensors=LLAMA_TENSORS | _experts_at("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    "deepseek_v3": deepseek(compressed=True),
    "olmoe": replace(
        LLAMA,
        architecture="OlmoeForCausalLM",
        names={ours: theirs for ours, theirs in LLAMA_NAMES.items() if ours != "head_dim"},
        defaults=LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5},
        fixed={"hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
        always=LLAMA_ALWAYS | {"qk_norm": True, "qk_norm_over": "all_heads"},
        read=_read_olmoe,
        write=_write_olmoe,
        tensors=LLAMA_TENSORS | _experts_at("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    "gpt_oss": replace(
        LLAMA,
        architecture="GptOssForCausalLM",
        names=LLAMA_NAMES | {"attention_bias": "attention_bias"},
        defaults=LLAMA_DEFAULTS
        | {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True},
        fixed={"hidden_act": "silu"},
        always={name: value for name, value in LLAMA_ALWAYS.items() if name != "qkv_bias"} | {"attention_sinks": True},
        read=_read_gpt_oss,
        write=_write_gpt_oss,
        tensors=LLAMA_TENSORS
        | {
            f"layers.{{}}.{ours}": replace(stored, name=f"model.layers.{{}}.{stored.name}")
            for ours, stored in _GPT_OSS_TENSORS.items()
        },
    ),
}
