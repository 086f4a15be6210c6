"""Hugging Face folders: ``config.json`` and safetensors."""

from parallel_ops.models.huggingface.loading import config_from_pretrained
from parallel_ops.models.huggingface.pretrained import PretrainedModel

__all__ = ["PretrainedModel", "config_from_pretrained"]
