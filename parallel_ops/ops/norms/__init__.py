"""LayerNorm and RMSNorm, with an optional residual addition in front."""

from parallel_ops.ops.norms.layer_norm import layer_norm, layer_norm_reference
from parallel_ops.ops.norms.rms_norm import rms_norm, rms_norm_reference

__all__ = [
    "layer_norm",
    "layer_norm_reference",
    "rms_norm",
    "rms_norm_reference",
]
