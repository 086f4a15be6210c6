"""Benchmarks of messages between ranks: overlap, rings, experts, pipelines."""
