"""Linears whose matmuls overlap with the communication of tensor parallelism."""
