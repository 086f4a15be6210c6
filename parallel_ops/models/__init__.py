"""One transformer, which says GPT-2, Llama, Qwen and Mistral by its configuration, on any number of ranks."""

from parallel_ops.models.config import Llama3Scaling, TransformerConfig
from parallel_ops.models.transformer import Transformer

__all__ = ["Llama3Scaling", "Transformer", "TransformerConfig"]
