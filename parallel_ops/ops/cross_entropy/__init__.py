"""Cross-entropy of whole logits, and the local kernels of the vocab-parallel losses."""
