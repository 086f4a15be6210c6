"""Checkpoints: written, checked, found, resumed."""
