"""CUDA graphs captured while ranks communicate: by the calling thread, or beside a thread that watches events."""

import torch

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def refuse_capture(op: str, device_type: str, what: str, stream: torch.cuda.Stream | None = None) -> None:
    """RuntimeError if ``stream``, by default the current one, is being captured in a CUDA graph."""
    if device_type != "cuda":
        return
    with torch.cuda.stream(stream):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise RuntimeError(f"{op}: {what}")


def begin_watch_thread(device: torch.device) -> None:
    """Prepares the current thread, which never captures, to look at events of ``device`` until it ends.

    While another thread captures a graph in the usual, global mode, CUDA treats the query of any event as a mistake and
    invalidates that graph, unless the querying thread ignores what other threads capture.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    torch.ops.parallel_ops.thread_exchange_stream_capture_mode(torch.cuda.current_device(), _THREAD_LOCAL)
