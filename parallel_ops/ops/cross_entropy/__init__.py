"""Cross-entropy of whole logits, and the local kernels of the vocab-parallel losses."""

from parallel_ops.ops.cross_entropy.cross_entropy import cross_entropy, cross_entropy_reference

__all__ = [
    "cross_entropy",
    "cross_entropy_reference",
]
