"""Reference models: small, whole, and written around the package's ops."""

from parallel_ops.models.gpt import GPT, GPTConfig
from parallel_ops.models.ops import FUSED, PLAIN, Ops
from parallel_ops.models.parallel_gpt import ParallelGPT

__all__ = ["FUSED", "GPT", "PLAIN", "GPTConfig", "Ops", "ParallelGPT"]
