"""Hugging Face's names of configuration keys and tensors for each supported family, as tables."""

from dataclasses import replace
from typing import Any

from parallel_ops.models.experts import ExpertsConfig
from parallel_ops.models.huggingface.family import Family, Key, Part, TensorMapping, experts_at, in_layers
from parallel_ops.models.huggingface.rules import DEEPSEEK, GPT2, GPT_OSS, QWEN_WINDOWS, ROTARY, first_layers, window
from parallel_ops.models.latent import LatentAttentionConfig

_LLAMA_KEYS = {
    "vocab_size": Key("vocab_size"),
    "seq_length": Key("max_position_embeddings"),
    "num_layers": Key("num_hidden_layers"),
    "hidden_size": Key("hidden_size"),
    "num_heads": Key("num_attention_heads"),
    "num_kv_heads": Key("num_key_value_heads", None),
    "head_dim": Key("head_dim", None),
    "ffn_hidden_size": Key("intermediate_size"),
    "norm_eps": Key("rms_norm_eps", 1e-6),
    "attention_dropout": Key("attention_dropout", 0.0),
    "tied_embeddings": Key("tie_word_embeddings", False),
    "init_std": Key("initializer_range", 0.02),
}
_LLAMA_ALWAYS = {
    "activation": "swiglu", "norm": "rms_norm", "positions": "rotary", "bias": False, "qkv_bias": False,
}  # fmt: skip
_GATED = ("gate_proj", "up_proj", "down_proj")


def _keys(**defaults: Any) -> dict[str, Key]:
    """Llama's keys, of which these fields have another default."""
    return _LLAMA_KEYS | {ours: _LLAMA_KEYS[ours]._replace(default=value) for ours, value in defaults.items()}


def _without(names: dict[str, Any], *left_out: str) -> dict[str, Any]:
    return {name: value for name, value in names.items() if name not in left_out}


_LLAMA_LAYER = {
    "norm_attention": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "norm_mlp": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_LLAMA_TENSORS = {
    "tokens.weight": TensorMapping("model.embed_tokens.weight"),
    "norm.weight": TensorMapping("model.norm.weight"),
    "head.weight": TensorMapping("lm_head.weight"),
    **in_layers(_LLAMA_LAYER, ("weight", "bias")),
}
LLAMA = Family(
    architecture="LlamaForCausalLM",
    keys=_LLAMA_KEYS,
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    always=_LLAMA_ALWAYS,
    rules=(ROTARY,),
    tensors=_LLAMA_TENSORS,
    prefix="model.",
    constants=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)

_GPT2_LAYER = {"attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
_GPT2_TENSORS = {
    "tokens.weight": TensorMapping("transformer.wte.weight"),
    "positions.weight": TensorMapping("transformer.wpe.weight"),
    "norm.weight": TensorMapping("transformer.ln_f.weight"),
    "norm.bias": TensorMapping("transformer.ln_f.bias"),
    "head.weight": TensorMapping("lm_head.weight"),
    **in_layers({"norm_attention": "ln_1", "norm_mlp": "ln_2"}, ("weight", "bias"), "transformer.h"),
    **{
        name: replace(stored, transposed=name.endswith("weight"))
        for name, stored in in_layers(_GPT2_LAYER, ("weight", "bias"), "transformer.h").items()
    },
    **{
        f"layers.{{}}.attention.{ours}.{kind}": TensorMapping(
            f"transformer.h.{{}}.attn.c_attn.{kind}", kind == "weight", i, 3
        )
        for i, ours in enumerate("qkv")
        for kind in ("weight", "bias")
    },
}

_DEEPSEEK_LAYER = {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q": "self_attn.q_b_proj",
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
    _LLAMA_TENSORS
    | experts_at("mlp", *_GATED)
    | in_layers(_DEEPSEEK_LAYER)
    | {"layers.{}.mlp.router.selection_bias": TensorMapping("model.layers.{}.mlp.gate.e_score_correction_bias")}
)
_GPT_OSS_TENSORS = {
    "attention.sink": TensorMapping("self_attn.sinks"),
    "mlp.router.weight": TensorMapping("mlp.router.weight"),
    "mlp.router.bias": TensorMapping("mlp.router.bias"),
    "mlp.experts.gate_up": TensorMapping("mlp.experts.gate_up_proj", transposed=True, stacked=True, interleaved=True),
    "mlp.experts.gate_up_bias": TensorMapping("mlp.experts.gate_up_proj_bias", stacked=True, interleaved=True),
    "mlp.experts.down": TensorMapping("mlp.experts.down_proj", transposed=True, stacked=True),
    "mlp.experts.down_bias": TensorMapping("mlp.experts.down_proj_bias", stacked=True),
}


def _experts(always: dict[str, Any] | None = None, **keys: Key) -> dict[str, Part]:
    """The experts of a family whose auxiliary loss is Mixtral's; transformers adds it with ``output_router_logits``."""
    keys = {"ffn_hidden_size": Key("intermediate_size", None), "aux_loss": Key("router_aux_loss_coef", 0.001)} | keys
    return {"experts": Part(ExpertsConfig, keys, {"aux_loss_over": "model"} | (always or {}))}


# Of several families that have a configuration, the first is written.
FAMILIES = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        keys={
            "vocab_size": Key("vocab_size"),
            "seq_length": Key("n_positions"),
            "num_layers": Key("n_layer"),
            "hidden_size": Key("n_embd"),
            "num_heads": Key("n_head"),
            "ffn_hidden_size": Key("n_inner", None),
            "norm_eps": Key("layer_norm_epsilon", 1e-5),
            "attention_dropout": Key("attn_pdrop", 0.1),
            "tied_embeddings": Key("tie_word_embeddings", True),
            "init_std": Key("initializer_range", 0.02),
        },
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        always={},  # the defaults of TransformerConfig
        rules=(GPT2,),
        tensors=_GPT2_TENSORS,
        prefix="transformer.",
        constants=r"h\.\d+\.attn\.(masked_)?bias",
    ),
    "llama": LLAMA,
    "mistral": replace(
        LLAMA,
        architecture="MistralForCausalLM",
        keys=_keys(num_kv_heads=8),
        fixed={"hidden_act": "silu"},
        rules=(ROTARY, window(4096)),
    ),
    "qwen2": replace(
        LLAMA,
        architecture="Qwen2ForCausalLM",
        keys=_keys(num_kv_heads=32),
        fixed={"hidden_act": "silu"},
        always=_LLAMA_ALWAYS | {"qkv_bias": True},
        rules=(ROTARY, QWEN_WINDOWS),
    ),
    "qwen3": replace(
        LLAMA,
        architecture="Qwen3ForCausalLM",
        keys=_keys(num_kv_heads=32, head_dim=128),
        fixed={"hidden_act": "silu", "attention_bias": False},
        always=_LLAMA_ALWAYS | {"qk_norm": True},
        rules=(ROTARY, QWEN_WINDOWS),
    ),
    "mixtral": replace(
        LLAMA,
        architecture="MixtralForCausalLM",
        keys=_keys(num_kv_heads=8, norm_eps=1e-5),
        fixed={"hidden_act": "silu", "router_jitter_noise": 0.0},
        rules=(ROTARY, window(None)),
        parts=_experts(num_experts=Key("num_local_experts", 8), top_k=Key("num_experts_per_tok", 2)),
        ignored=("output_router_logits",),
        tensors=_LLAMA_TENSORS | experts_at("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "qwen3_moe": replace(
        LLAMA,
        architecture="Qwen3MoeForCausalLM",
        keys=_keys(num_kv_heads=4),
        fixed={"hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1, "use_sliding_window": False},
        always=_LLAMA_ALWAYS | {"qk_norm": True},
        parts=_experts(
            num_experts=Key("num_experts", 128),
            top_k=Key("num_experts_per_tok", 8),
            ffn_hidden_size=Key("moe_intermediate_size", 768),
            normalize=Key("norm_topk_prob", False),
            dense_layers=Key("mlp_only_layers", (), first_layers, lambda count: list(range(count))),
        ),
        aliases={"num_local_experts": "num_experts"},
        ignored=("output_router_logits", "sliding_window", "max_window_layers"),
        tensors=_LLAMA_TENSORS | experts_at("mlp", *_GATED),
    ),
    "deepseek_v3": replace(
        LLAMA,
        architecture="DeepseekV3ForCausalLM",
        keys=_without(_LLAMA_KEYS, "head_dim", "num_kv_heads"),
        fixed={
            "hidden_act": "silu", "attention_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        },
        rules=(ROTARY, DEEPSEEK),
        parts={
            "latent": Part(LatentAttentionConfig, {
                "q_lora_rank": Key("q_lora_rank", 1536),
                "kv_lora_rank": Key("kv_lora_rank", 512),
                "qk_nope_head_dim": Key("qk_nope_head_dim", 128),
                "qk_rope_head_dim": Key("qk_rope_head_dim", 64),
                "v_head_dim": Key("v_head_dim", 128),
                "interleaved": Key("rope_interleave", True),
            }),
            "experts": Part(ExpertsConfig, {
                "num_experts": Key("n_routed_experts", 256),
                "top_k": Key("num_experts_per_tok", 8),
                "ffn_hidden_size": Key("moe_intermediate_size", 2048),
                "shared_experts": Key("n_shared_experts", 1),
                "dense_layers": Key("first_k_dense_replace", 3),
                "normalize": Key("norm_topk_prob", True),
                "scale": Key("routed_scaling_factor", 2.5),
                "groups": Key("n_group", 8),
                "top_groups": Key("topk_group", 4),
            }, {"score": "sigmoid", "selection_bias": True}),
        },
        ignored=("head_dim", "qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha", "output_router_logits"),
        tensors=_DEEPSEEK_TENSORS,
        copies={"embed_tokens.weight": "tokens.weight", "shared_head.head.weight": "head.weight"},
    ),
    "olmoe": replace(
        LLAMA,
        architecture="OlmoeForCausalLM",
        keys=_without(_keys(norm_eps=1e-5), "head_dim"),
        fixed={"hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
        always=_LLAMA_ALWAYS | {"qk_norm": True, "qk_norm_over": "all_heads"},
        parts=_experts(
            num_experts=Key("num_experts", 64),
            top_k=Key("num_experts_per_tok", 8),
            normalize=Key("norm_topk_prob", False),
        ),
        ignored=("output_router_logits",),
        tensors=_LLAMA_TENSORS | experts_at("mlp", *_GATED),
    ),
    "gpt_oss": replace(
        LLAMA,
        architecture="GptOssForCausalLM",
        keys=_keys(num_kv_heads=8, head_dim=64, norm_eps=1e-5) | {"attention_bias": Key("attention_bias", True)},
        fixed={"hidden_act": "silu"},
        always=_without(_LLAMA_ALWAYS, "qkv_bias") | {"attention_sinks": True},
        rules=(GPT_OSS,),
        parts=_experts(
            {"top_k_first": True, "router_bias": True, "bias": True, "swiglu_up_offset": 1.0},
            num_experts=Key("num_local_experts", 128),
            top_k=Key("num_experts_per_tok", 4),
            swiglu_alpha=Key("swiglu_alpha", 1.702),
            swiglu_limit=Key("swiglu_limit", 7.0),
        ),
        aliases={"experts_per_token": "num_experts_per_tok"},
        ignored=("output_router_logits", "initial_context_length"),  # the latter is in rope_scaling, which is read
        tensors=_LLAMA_TENSORS
        | {
            f"layers.{{}}.{ours}": replace(stored, name=f"model.layers.{{}}.{stored.name}")
            for ours, stored in _GPT_OSS_TENSORS.items()
        },
    ),
}  # fmt: skip
# DeepSeek-V3 with queries that are not compressed, as smaller models have them.
DEEPSEEK_PLAIN = replace(
    FAMILIES["deepseek_v3"], tensors=_DEEPSEEK_TENSORS | in_layers({"attention.q": "self_attn.q_proj"})
)
