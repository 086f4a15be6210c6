"""Folders of tiny models of transformers, with weights so large that every part shows in the logits."""

import json

import torch
import transformers
from safetensors.torch import save_file

from parallel_ops.models.experts import ExpertsConfig
from parallel_ops.models.huggingface import tensor_files
from support.integrations import huggingface
from support.runs.tensor_files import tensors_in

SIZES = huggingface.SIZES | {"attn_implementation": "eager"}
GPT2_SIZES = huggingface.GPT2_SIZES | {"attn_implementation": "eager"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 16,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
GPT_OSS = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "swiglu_limit": 0.8}
DEEPSEEK = SIZES | {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 20, "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 10,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 16,
}  # fmt: skip
GPT_OSS_EXPERTS = ExpertsConfig(
    num_experts=4, top_k=2, ffn_hidden_size=128, top_k_first=True, router_bias=True, bias=True, swiglu_alpha=1.702,
    swiglu_limit=7.0, swiglu_up_offset=1.0,
)  # fmt: skip
MODELS = {
    "gpt2": lambda: transformers.GPT2Config(**GPT2_SIZES),
    "gpt2-untied": lambda: transformers.GPT2Config(
        **GPT2_SIZES, tie_word_embeddings=False, n_inner=40, activation_function="gelu"
    ),
    "llama2": lambda: transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=dict(LLAMA3), head_dim=12),
    "llama-yarn": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=5),
    "mistral-whole": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, **WINDOWS, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, sliding_window=5),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20, mlp_only_layers=[0]
    ),
    "qwen3_moe-normed": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, norm_topk_prob=True
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**DEEPSEEK),
    "deepseek_v3-yarn": lambda: transformers.DeepseekV3Config(
        **DEEPSEEK, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.5}
    ),
    "deepseek_v3-plain": lambda: transformers.DeepseekV3Config(
        **DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False, "n_shared_experts": 2, "first_k_dense_replace": 0}
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **SIZES | {"num_key_value_heads": 4}, num_experts=4, num_experts_per_tok=2, pad_token_id=None
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, **GPT_OSS, rope_parameters={"rope_type": "default", "rope_theta": 5_000.0}
    ),
    "gpt_oss-yarn": lambda: transformers.GptOssConfig(
        **SIZES, **GPT_OSS, attention_bias=False, layer_types=["full_attention"] * 2,
        rope_parameters=YARN | {"truncate": False},
    ),
}  # fmt: skip


def make(name):
    """A model of transformers, with biases and norms that show."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if p.dim() == 1 or parameter_name.endswith("bias"):
                p.normal_(0.0 if parameter_name.endswith("bias") else 1.0, 0.3)
    return model


class Folders:
    """Folders by the names of ``MODELS``, made when they are asked for.

    Those with an odd number of letters have several files.
    """

    def __init__(self, root):
        self.root = root

    def __truediv__(self, name):
        folder = self.root / name
        if not folder.exists():
            make(name).save_pretrained(folder, max_shard_size="20KB" if len(name) % 2 else "5GB")
            assert (folder / tensor_files.INDEX).exists() == bool(len(name) % 2)
        return folder


def logits_of(model, tokens):
    """Of a model of transformers, ``[s, b, V]``."""
    with torch.no_grad():
        return model(tokens.t()).logits.transpose(0, 1)


def opened(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def same_tensors(a, b):
    a, b = tensors_in(a), tensors_in(b)
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


def assert_same_gradients(folder, want):
    """Gradients that were saved as weights are."""
    grads = tensors_in(folder)
    assert grads.keys() == want.keys()
    for key, t in want.items():
        torch.testing.assert_close(grads[key], t, rtol=1e-3, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


def change_config(source, target, **changes):
    """A copy of a folder, in one file, with other options; ``...`` takes one out."""
    options = json.loads((source / "config.json").read_text()) | changes
    target.mkdir()
    (target / "config.json").write_text(json.dumps({k: v for k, v in options.items() if v is not ...}))
    save_file(tensors_in(source), target / tensor_files.SINGLE)
    return target


def change_tensors(folder, changes):
    """Other tensors in its one file; ``None`` takes one out."""
    tensors = {name: t for name, t in (tensors_in(folder) | changes).items() if t is not None}
    save_file(tensors, folder / tensor_files.SINGLE)
    return folder
