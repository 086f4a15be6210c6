"""Benchmarks of whole layers, models and training steps, beside Megatron, Transformers and plain PyTorch."""
