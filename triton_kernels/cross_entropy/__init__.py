"""Kernels and launchers of cross-entropy."""
