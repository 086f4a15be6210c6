"""Peak memory of one call: tensor bytes alive at once beyond the inputs (outputs, saved for backward, temporaries)."""

import os
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

# The profiler reports its own start and stop on stderr otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """On CUDA the allocator's own peak; on CPU the running sum of the allocations and frees that the profiler saw."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    results = profiler.profiler.kineto_results
    events = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    alive = peak = 0
    for _, size in events:
        alive += size
        peak = max(peak, alive)
    return peak
