"""Parallel layers and models beside one process."""
