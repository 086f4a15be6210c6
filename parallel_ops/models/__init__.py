"""One transformer for any number of ranks: GPT-2, Llama, Qwen, Mistral, GPT-OSS and DeepSeek by its configuration."""

from parallel_ops.models.config import TransformerConfig
from parallel_ops.models.experts import ExpertsConfig
from parallel_ops.models.huggingface import config_from_pretrained
from parallel_ops.models.latent import LatentAttentionConfig
from parallel_ops.models.rotary_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from parallel_ops.models.transformer import Transformer

__all__ = [
    "DynamicScaling",
    "ExpertsConfig",
    "LatentAttentionConfig",
    "LinearScaling",
    "Llama3Scaling",
    "Transformer",
    "TransformerConfig",
    "YarnScaling",
    "config_from_pretrained",
]
