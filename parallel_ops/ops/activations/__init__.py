"""GeLU, SwiGLU and their gated relatives, fused with a bias or a second factor."""
