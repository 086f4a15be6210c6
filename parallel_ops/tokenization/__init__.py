"""Text to token files: ``parallel-ops tokenize``, in Python ``run.tokenize``. Needs numpy and tokenizers, not torch."""

from parallel_ops.tokenization.options import Options, Summary

__all__ = ["Options", "Summary"]
