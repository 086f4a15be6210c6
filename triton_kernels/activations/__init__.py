"""Kernels and launchers of the activations."""
