"""Time of products and kernels."""
