"""Attention that never writes its scores to memory."""

from parallel_ops.ops.attention.flash_attention import flash_attention, flash_attention_reference

__all__ = [
    "flash_attention",
    "flash_attention_reference",
]
