"""CUDA graphs captured while ranks communicate."""

import torch


def refuse_capture(op: str, device_type: str, what: str) -> None:
    """RuntimeError if the current stream is being captured in a CUDA graph."""
    if device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{op}: {what}")
