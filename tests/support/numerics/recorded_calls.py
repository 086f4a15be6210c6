"""What a process asks of its process groups: torch's own methods, recorded."""

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

from torch.distributed import ProcessGroup

# The methods behind torch's functions, by what they do; torch 2.13 renamed three of them.
METHODS = {
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv": "recv",
}


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[str]]:
    """The names of the collectives and messages that this process starts in the block, in order."""
    calls: list[str] = []

    def recording(method: Any, name: str) -> Any:
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return method(group, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for method, name in METHODS.items():
            if hasattr(ProcessGroup, method):
                replaced = recording(getattr(ProcessGroup, method), name)
                stack.enter_context(unittest.mock.patch.object(ProcessGroup, method, replaced))
        yield calls
