"""Tiny models of the families that ``huggingface.apply`` takes, beside those of ``huggingface_models.py``."""

import torch
import transformers

from support.integrations.huggingface import SIZES
from support.integrations.huggingface_models import OLD, with_drawn_vectors

EVERY = SIZES | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = EVERY | {"head_dim": 16}
SOFT_CAPS = HEADS | {"final_logit_softcapping": 0.7, "sliding_window": 6}
FACTORS = {"logits_scaling": 3.0, "residual_multiplier": 0.4, "embedding_multiplier": 2.0, "attention_multiplier": 0.3}
SLIDING = ["sliding_attention", "full_attention"]

# Before Transformers 5 StableLM's norms of each head, without a bias, cannot be made.
# Name: (class of the configuration, its arguments). Every option that changes a formula differs from its neutral value.
DENSE = {
    "smollm3": ("SmolLM3Config", EVERY | {"no_rope_layers": [1, 0]}),
    "ministral": ("MinistralConfig", HEADS | {"sliding_window": 6, "layer_types": SLIDING}),
    "ministral3": ("Ministral3Config", HEADS),
    "exaone4": ("Exaone4Config", EVERY | {"sliding_window": 6, "layer_types": SLIDING}),
    "olmo": ("OlmoConfig", EVERY | {"clip_qkv": 1.5}),
    "olmo2": ("Olmo2Config", EVERY),
    "olmo3": ("Olmo3Config", EVERY | {"sliding_window": 6, "layer_types": SLIDING}),
    "stablelm": ("StableLmConfig", EVERY | {"use_qkv_bias": True, "qk_layernorm": not OLD}),
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
# Families with experts, linear attention, latent attention or activations without an op, which are served in part.
WINDOW = {"sliding_window": 6, "layer_types": SLIDING}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
FEW = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MANY = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
SHARED = MANY | {"shared_expert_intermediate_size": 24}
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
GROUPS = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}

HYBRIDS = {
    "qwen2_moe": ("Qwen2MoeConfig", EVERY | SHARED),
    "qwen3_5": ("Qwen3_5TextConfig", HEADS | DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", HEADS | DELTA_NET | SHARED),
    "qwen3_next": ("Qwen3NextConfig", HEADS | DELTA_NET | SHARED),
    "gemma4": ("Gemma4TextConfig", HEADS | WINDOW | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    "vaultgemma": ("VaultGemmaConfig", HEADS | WINDOW),
    "gpt_oss": ("GptOssConfig", HEADS | LOCAL | WINDOW | {"rope_parameters": YARN}),
    "llama4": (
        "Llama4TextConfig",
        HEADS | LOCAL | {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, "attention_chunk_size": 8},
    ),
    "deepseek_v2": ("DeepseekV2Config", EVERY | LATENT | GROUPS),
    "deepseek_v3": ("DeepseekV3Config", EVERY | LATENT | GROUPS),
    "deepseek_v32": ("DeepseekV32Config", EVERY | LATENT | GROUPS),
    "glm4_moe": ("Glm4MoeConfig", HEADS | GROUPS),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", EVERY | LATENT | GROUPS),
    "glm_moe_dsa": ("GlmMoeDsaConfig", EVERY | LATENT | GROUPS),
    "minimax": (
        "MiniMaxConfig",
        HEADS | LOCAL | {"layer_types": ["full_attention", "linear_attention"], "block_size": 8},
    ),
    "minimax_m2": ("MiniMaxM2Config", HEADS | LOCAL),
    "ernie4_5": ("Ernie4_5Config", HEADS),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        EVERY | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1},
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", HEADS | {"num_experts": 4, "moe_topk": 2}),
    "hy_v3": ("HYV3Config", HEADS | GROUPS),
    "granitemoe": ("GraniteMoeConfig", EVERY | LOCAL),
    "flex_olmo": ("FlexOlmoConfig", EVERY | FEW),
    "olmo_hybrid": ("OlmoHybridConfig", EVERY),
    "dots1": ("Dots1Config", HEADS | GROUPS),
    "exaone_moe": ("ExaoneMoeConfig", HEADS | WINDOW | MANY),
    "afmoe": ("AfmoeConfig", HEADS | WINDOW | FEW | {"moe_intermediate_size": 24, "num_dense_layers": 1}),
    "cohere2_moe": ("Cohere2MoeConfig", EVERY | FEW),
    "solar_open": ("SolarOpenConfig", HEADS | GROUPS),
    "laguna": ("LagunaConfig", HEADS | SHARED),
    "mellum": ("MellumConfig", HEADS | LOCAL | {"moe_intermediate_size": 24}),
    "mimo_v2_flash": ("MiMoV2FlashConfig", HEADS | GROUPS | {"v_head_dim": 16}),
    "youtu": ("YoutuConfig", EVERY | LATENT),
    "arcee": ("ArceeConfig", HEADS),
    "apertus": ("ApertusConfig", HEADS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "nemotron": ("NemotronConfig", HEADS),
    "jais2": ("Jais2Config", HEADS),
    "phi": ("PhiConfig", EVERY),
    "gpt_neox": ("GPTNeoXConfig", EVERY),
}
DENSE, HYBRIDS = (
    {name: row for name, row in table.items() if hasattr(transformers, row[0])} for table in (DENSE, HYBRIDS)
)

# What is kept of a family, by the end of a module's name and a part of the reason.
KEPT = {
    "gemma2": {"self_attn": "capped" if OLD else "'eager' attention"},
    "cohere-norms": {"q_norm": "differs between heads", "k_norm": "differs between heads"},
}


def model_of(family, **options):
    """Drawn from one seed, its norms and biases too."""
    cls, arguments = (DENSE | HYBRIDS | {"llama": ("LlamaConfig", SIZES)})[family]
    torch.manual_seed(0)
    config = getattr(transformers, cls)(**arguments | options)
    return with_drawn_vectors(transformers.AutoModelForCausalLM.from_config(config)).train()


# Models of text and images: four places of an image between two marks.
START, IMAGE, END = 70, 71, 72
TEXT = EVERY | {"vocab_size": 80}
MROPE = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP = VISION | {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "projection_dim": 16}
PIXTRAL = VISION | {"model_type": "pixtral", "image_size": 16, "patch_size": 4, "head_dim": 8}
SIGLIP = VISION | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4}
PATCHES = {"depth": 2, "num_heads": 2, "patch_size": 4}
PATCHES_2 = PATCHES | {"embed_dim": 16, "hidden_size": 32}
PATCHES_2_5 = PATCHES | {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
PATCHES_3 = PATCHES_2_5 | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1]}
TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 73}
LLAVA = {"vision_config": CLIP, "image_token_index": IMAGE}
MISTRAL = TEXT | {"model_type": "mistral"}
GEMMA3 = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END, "mm_tokens_per_image": 4}
# By the model_type of Transformers 5.
WITH_IMAGES = {
    "llava": LLAVA | {"text_config": TEXT | {"model_type": "llama"}},
    "llava_next": LLAVA | {"text_config": MISTRAL},
    "mistral3": LLAVA | {"text_config": MISTRAL, "vision_config": PIXTRAL},
    "gemma3": GEMMA3 | {"text_config": HEADS | WINDOW | {"vocab_size": 80}, "vision_config": SIGLIP},
    "qwen2_vl": TOKENS | {"text_config": MROPE, "vision_config": PATCHES_2},
    "qwen2_5_vl": TOKENS | {"text_config": MROPE, "vision_config": PATCHES_2_5 | WINDOWS},
    "qwen3_vl": TOKENS | {"text_config": MROPE | {"head_dim": 8}, "vision_config": PATCHES_3},
}


def composite_of(name):
    """A model of text and images, and what it needs beside the tokens for one image a sequence, of two sequences."""
    extra = {"pixel_values": torch.randn(2, 3, 16, 16)}
    if "qwen" in name:
        extra = {"pixel_values": torch.randn(32, 96), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    elif name == "mistral3":
        extra["image_sizes"] = torch.tensor([[16, 16]] * 2)
    elif name == "llava_next":  # by text alone
        extra = None
    config = transformers.AutoConfig.for_model(name, **WITH_IMAGES[name])
    return transformers.AutoModelForImageTextToText.from_config(config), extra
