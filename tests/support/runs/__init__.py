"""Runs of the trainer, the demo and tokenize."""
