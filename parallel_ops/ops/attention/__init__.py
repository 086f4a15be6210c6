"""Attention that never writes its scores to memory, and the ranges of keys that its queries see."""

from parallel_ops.ops.attention.flash_attention import flash_attention
from parallel_ops.ops.attention.ranges import (
    block_causal_ranges,
    causal_ranges,
    document_ranges,
    intersect_ranges,
    prefix_ranges,
)
from parallel_ops.ops.attention.reference import flash_attention_reference

__all__ = [
    "block_causal_ranges",
    "causal_ranges",
    "document_ranges",
    "flash_attention",
    "flash_attention_reference",
    "intersect_ranges",
    "prefix_ranges",
]
