"""Linear layers whose products overlap the communication of tensor parallelism."""
