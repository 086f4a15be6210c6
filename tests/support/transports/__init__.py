"""Stand-ins of NCCL and CUDA, loopback groups, and collectives."""
