"""LayerNorm and RMSNorm, with an optional residual addition in front."""
