"""Hugging Face folders: ``config.json`` and safetensors."""

from parallel_ops.models.huggingface.pretrained import PretrainedModel, config_from_pretrained

__all__ = ["PretrainedModel", "config_from_pretrained"]
