"""Compute: time of matmuls and kernels."""
