"""The families of Transformers whose models ``apply`` takes."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

# The package in transformers.models, and the class of the base model. Its modules are served, and the loss of the heads
# of its package.
FAMILIES = {
    "afmoe": "AfmoeModel",
    "apertus": "ApertusModel",
    "arcee": "ArceeModel",
    "cohere": "CohereModel",
    "cohere2": "Cohere2Model",
    "cohere2_moe": "Cohere2MoeModel",
    "deepseek_v2": "DeepseekV2Model",
    "deepseek_v3": "DeepseekV3Model",
    "deepseek_v32": "DeepseekV32Model",
    "dots1": "Dots1Model",
    "ernie4_5": "Ernie4_5Model",
    "ernie4_5_moe": "Ernie4_5_MoeModel",
    "exaone4": "Exaone4Model",
    "exaone_moe": "ExaoneMoeModel",
    "flex_olmo": "FlexOlmoModel",
    "gemma": "GemmaModel",
    "gemma2": "Gemma2Model",
    "gemma3": "Gemma3TextModel",
    "gemma4": "Gemma4TextModel",
    "glm": "GlmModel",
    "glm4": "Glm4Model",
    "glm4_moe": "Glm4MoeModel",
    "glm4_moe_lite": "Glm4MoeLiteModel",
    "glm_moe_dsa": "GlmMoeDsaModel",
    "gpt2": "GPT2Model",
    "gpt_neox": "GPTNeoXModel",
    "gpt_oss": "GptOssModel",
    "granite": "GraniteModel",
    "granitemoe": "GraniteMoeModel",
    "hunyuan_v1_dense": "HunYuanDenseV1Model",
    "hunyuan_v1_moe": "HunYuanMoEV1Model",
    "hy_v3": "HYV3Model",
    "jais2": "Jais2Model",
    "laguna": "LagunaModel",
    "llama": "LlamaModel",
    "llama4": "Llama4TextModel",
    "mellum": "MellumModel",
    "mimo_v2_flash": "MiMoV2FlashModel",
    "minimax": "MiniMaxModel",
    "minimax_m2": "MiniMaxM2Model",
    "ministral": "MinistralModel",
    "ministral3": "Ministral3Model",
    "mistral": "MistralModel",
    "mixtral": "MixtralModel",
    "nemotron": "NemotronModel",
    "olmo": "OlmoModel",
    "olmo2": "Olmo2Model",
    "olmo3": "Olmo3Model",
    "olmo_hybrid": "OlmoHybridModel",
    "olmoe": "OlmoeModel",
    "phi": "PhiModel",
    "phi3": "Phi3Model",
    "qwen2": "Qwen2Model",
    "qwen2_5_vl": "Qwen2_5_VLTextModel",
    "qwen2_moe": "Qwen2MoeModel",
    "qwen2_vl": "Qwen2VLTextModel",
    "qwen3": "Qwen3Model",
    "qwen3_5": "Qwen3_5TextModel",
    "qwen3_5_moe": "Qwen3_5MoeTextModel",
    "qwen3_moe": "Qwen3MoeModel",
    "qwen3_next": "Qwen3NextModel",
    "qwen3_vl": "Qwen3VLTextModel",
    "seed_oss": "SeedOssModel",
    "smollm3": "SmolLM3Model",
    "solar_open": "SolarOpenModel",
    "stablelm": "StableLmModel",
    "starcoder2": "Starcoder2Model",
    "vaultgemma": "VaultGemmaModel",
    "youtu": "YoutuModel",
}

# Packages of models of text and images. Of these the text model is served, if it is one of the above.
COMPOSITES = ("gemma3", "llava", "llava_next", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")


def stock_of(module: nn.Module) -> type[nn.Module] | None:
    """The class of a known family that ``module`` is or inherits from."""
    return next((cls for cls in type(module).__mro__ if _package(cls) in FAMILIES), None)


def is_base(module: nn.Module) -> bool:
    """Whether ``module`` is the base model of a known family."""
    return any(FAMILIES.get(_package(cls)) == cls.__name__ for cls in type(module).__mro__)


def is_composite(module: nn.Module) -> bool:
    """Whether ``module`` is, or is a part of, a model of text and images that has a text model of a known family."""
    if not isinstance(module, PreTrainedModel) or not hasattr(module.config, "vision_config"):
        return False
    return any(_package(cls) in COMPOSITES for cls in type(module).__mro__) and contains_base(module)


def base_of(model: nn.Module) -> str:
    """The name of the base model in a model with a head; ``base_model`` is the model itself in some versions."""
    return next(name for name, child in model.named_children() if is_base(child))


def contains_base(module: nn.Module) -> bool:
    return any(is_base(m) for m in module.modules())


def _package(cls: Any) -> str:
    """The package of a class of transformers.models; "" for another class."""
    parts = cls.__module__.split(".")
    return parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else ""
