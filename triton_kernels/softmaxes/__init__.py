"""Kernels and launchers of the two softmaxes."""
