"""Tiny models of the families that ``huggingface.apply`` takes, beside those of ``huggingface_models.py``."""

import transformers

from support.huggingface import SIZES

EVERY = SIZES | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = EVERY | {"head_dim": 16}
SOFT_CAPS = HEADS | {"final_logit_softcapping": 0.7, "sliding_window": 6}
FACTORS = {"logits_scaling": 3.0, "residual_multiplier": 0.4, "embedding_multiplier": 2.0, "attention_multiplier": 0.3}
SLIDING = ["sliding_attention", "full_attention"]

# Name: (class of the configuration, its arguments). Every option that changes a formula differs from its neutral value.
DENSE = {
    "smollm3": ("SmolLM3Config", EVERY | {"no_rope_layers": [1, 0]}),
    "ministral": ("MinistralConfig", HEADS | {"sliding_window": 6, "layer_types": SLIDING}),
    "ministral3": ("Ministral3Config", HEADS),
    "exaone4": ("Exaone4Config", EVERY | {"sliding_window": 6, "layer_types": SLIDING}),
    "olmo": ("OlmoConfig", EVERY | {"clip_qkv": 1.5}),
    "olmo2": ("Olmo2Config", EVERY),
    "olmo3": ("Olmo3Config", EVERY | {"sliding_window": 6, "layer_types": SLIDING}),
    "stablelm": ("StableLmConfig", EVERY | {"use_qkv_bias": True, "qk_layernorm": True}),
    "stablelm-parallel": ("StableLmConfig", EVERY | {"use_parallel_residual": True}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", HEADS),
    "gemma": ("GemmaConfig", HEADS),
    "gemma2": ("Gemma2Config", SOFT_CAPS | {"attn_logit_softcapping": 0.9}),
    "gemma3": ("Gemma3TextConfig", SOFT_CAPS | {"layer_types": SLIDING}),
    "phi3": ("Phi3Config", EVERY),
    "phi3-partial": ("Phi3Config", EVERY | {"partial_rotary_factor": 0.5, "hidden_act": "gelu"}),
    "glm": ("GlmConfig", HEADS),
    "glm4": ("Glm4Config", HEADS),
    "starcoder2": ("Starcoder2Config", EVERY | {"use_bias": True, "sliding_window": 6}),
    "granite": ("GraniteConfig", EVERY | FACTORS),
    "seed_oss": ("SeedOssConfig", HEADS | {"attention_dropout": 0.0, "residual_dropout": 0.0}),
    "cohere": ("CohereConfig", EVERY | {"logit_scale": 0.3}),
    "cohere-norms": ("CohereConfig", EVERY | {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": ("Cohere2Config", EVERY | {"logit_scale": 0.3, "sliding_window": 6, "layer_types": SLIDING}),
}  # fmt: skip
DENSE = {name: row for name, row in DENSE.items() if hasattr(transformers, row[0])}

# What is kept of a family, by the end of a module's name and a part of the reason.
KEPT = {
    "gemma2": {"self_attn": "'eager' attention"},
    "cohere-norms": {"q_norm": "differs between heads", "k_norm": "differs between heads"},
}


def config_of(name, **options):
    cls, arguments = DENSE[name]
    return getattr(transformers, cls)(**arguments | options)
