"""Models of Transformers and Megatron-core."""
