"""Compute: time of matrix products and kernels."""
