"""Tiny models of the families that ``huggingface.apply`` takes, beside those of ``huggingface_models.py``."""

import torch
import transformers

from support.integrations.huggingface import SIZES
from support.integrations.huggingface_models import OLD

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
DENSE = {name: row for name, row in DENSE.items() if hasattr(transformers, row[0])}

# What is kept of a family, by the end of a module's name and a part of the reason.
KEPT = {
    "gemma2": {"self_attn": "capped" if OLD else "'eager' attention"},
    "cohere-norms": {"q_norm": "differs between heads", "k_norm": "differs between heads"},
}


def config_of(name, **options):
    cls, arguments = DENSE[name]
    return getattr(transformers, cls)(**arguments | options)


# Models of text and images: four places of an image between two marks.
START, IMAGE, END = 70, 71, 72
TEXT = EVERY | {"vocab_size": 80}
MROPE = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
PATCHES = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 32,
}
TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 73}


def composite_of(name):
    """A model of text and images, and what it needs beside the tokens for one image a sequence, of two sequences."""
    t = transformers
    pictures = {"pixel_values": torch.randn(2, 3, 16, 16)}
    patches = {"pixel_values": torch.randn(32, 96), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    clip = {"image_size": 16, "patch_size": 8, "projection_dim": 16}
    if name == "llava":
        vision = t.CLIPVisionConfig(**VISION, **clip)
        config = t.LlavaConfig(text_config=t.LlamaConfig(**TEXT), vision_config=vision, image_token_index=IMAGE)
        made, extra = t.LlavaForConditionalGeneration(config), pictures
    elif name == "llava_next":  # by text alone
        vision = t.CLIPVisionConfig(**VISION, **clip)
        config = t.LlavaNextConfig(text_config=t.MistralConfig(**TEXT), vision_config=vision, image_token_index=IMAGE)
        made, extra = t.LlavaNextForConditionalGeneration(config), None
    elif name == "mistral3":
        vision = t.PixtralVisionConfig(**VISION, image_size=16, patch_size=4, head_dim=8)
        config = t.Mistral3Config(text_config=t.MistralConfig(**TEXT), vision_config=vision, image_token_index=IMAGE)
        sizes = {"image_sizes": torch.tensor([[16, 16]] * 2)}
        made, extra = t.Mistral3ForConditionalGeneration(config), pictures | sizes
    elif name == "gemma3":
        config = t.Gemma3Config(
            text_config=t.Gemma3TextConfig(**TEXT, head_dim=16, sliding_window=6, layer_types=SLIDING),
            vision_config=t.SiglipVisionConfig(**VISION, image_size=16, patch_size=4),
            image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END, mm_tokens_per_image=4,
        )  # fmt: skip
        made, extra = t.Gemma3ForConditionalGeneration(config), pictures
    elif name == "qwen2_vl":
        vision = {"depth": 2, "num_heads": 2, "patch_size": 4, "embed_dim": 16, "hidden_size": 32}
        config = t.Qwen2VLConfig(text_config=MROPE, vision_config=vision, **TOKENS)
        made, extra = t.Qwen2VLForConditionalGeneration(config), patches
    elif name == "qwen2_5_vl":
        vision = PATCHES | {"window_size": 16, "fullatt_block_indexes": [1]}
        config = t.Qwen2_5_VLConfig(text_config=MROPE, vision_config=vision, **TOKENS)
        made, extra = t.Qwen2_5_VLForConditionalGeneration(config), patches
    else:
        vision = PATCHES | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        config = t.Qwen3VLConfig(text_config=MROPE | {"head_dim": 8}, vision_config=vision, **TOKENS)
        made, extra = t.Qwen3VLForConditionalGeneration(config), patches
    return made, extra
