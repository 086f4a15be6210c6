"""Kernels and launchers of layer_norm and rms_norm."""
