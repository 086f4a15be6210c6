"""Tiny models of families with experts, linear attention, latent attention or activations without an op, whose modules
``huggingface.apply`` serves in part; and the table of what is served, for docs/huggingface.md."""

from typing import Any

import torch
import transformers

from parallel_ops.integrations import huggingface
from support.integrations.huggingface_families import EVERY, HEADS, SLIDING
from support.integrations.huggingface_models import with_drawn_vectors

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

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
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
HYBRIDS = {name: row for name, row in HYBRIDS.items() if hasattr(transformers, row[0])}
# What another order of sums may change more than 3e-6 of a gradient: stock's own rounding is 1.2e-5 for Gemma 4.
SENSITIVE = {"gemma4": 1e-4, "qwen3_next": 1e-4, "qwen3_5_moe": 2e-5, "olmo_hybrid": 2e-5}


def hybrid_of(family: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    name, options = HYBRIDS[family]
    return with_drawn_vectors(
        transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**options))
    ).train()


def served(family: str) -> tuple[list[str], dict[str, str]]:
    """The ops that a model of the family calls after ``apply``, and what is kept of it, by the end of its name."""
    applied = huggingface.apply(hybrid_of(family))
    ops = sorted({op for of_module in applied.replaced.values() for op in of_module})
    kept = {}
    for name, reason in applied.unreplaced.items():
        ops_of_reason = [part.partition(": ")[0] for part in reason.split("; ")]
        kept[name.rpartition(".")[2]] = ", ".join(op for op in ops_of_reason if op.isidentifier())
    return ops, kept


_OF_EXPERTS = {"sort_by_expert", "permute", "grouped_linear", "unpermute"}


def table() -> list[str]:
    """Rows of Markdown, one a family."""
    rows = ["| `model_type` | ops | stays stock's |", "|---|---|---|"]
    for family in HYBRIDS:
        ops, kept = served(family)
        words = [f"`{op}`" for op in ops if op not in _OF_EXPERTS and op != "vocab_parallel_linear_cross_entropy"]
        words += ["experts"] * ("grouped_linear" in ops) + ["loss without logits"] * (
            "vocab_parallel_linear_cross_entropy" in ops
        )
        left = ", ".join(f"{name}: `{op.replace(', ', '`, `')}`" for name, op in kept.items())
        rows.append(f"| `{family}` | {', '.join(words)} | {left} |")
    return rows


if __name__ == "__main__":
    print("\n".join(table()))
