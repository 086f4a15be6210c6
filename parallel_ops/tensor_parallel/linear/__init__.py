"""Linears whose products overlap with the communication of tensor parallelism."""
