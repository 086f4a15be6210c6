"""Softmax of attention scores, scaled, under a mask or a causal triangle."""
