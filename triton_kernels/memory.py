"""Memory that outlives the call which allocates it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def lasting(device: torch.device, make: Callable[[], T]) -> T:
    """``make()`` on the current stream of ``device``, with memory of no pool that this thread allocates from.

    Inductor's CUDA graphs (``mode="reduce-overhead"``) take all memory of a first run from a pool, and raise if any of
    it outlives the run without being a result. A pool is one thread's (``torch.cuda.use_mem_pool``): another allocates.
    """
    stream = torch.cuda.current_stream(device)

    def run() -> T:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()
