"""Kernels and launchers of block attention."""
