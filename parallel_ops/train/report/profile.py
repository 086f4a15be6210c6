"""A trace of some steps by torch's profiler, and a snapshot of the GPU's memory."""

from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from parallel_ops.train.report.outputs import optional

if TYPE_CHECKING:
    from parallel_ops.train.run_state import RunState

# The files in ``logging.profile``: for Perfetto or chrome://tracing, and for https://pytorch.org/memory_viz.
EVENTS, MEMORY = "trace.json", "memory.pickle"
_STEPS = 3
# Allocations in the snapshot; some ten thousand a step.
_ALLOCATIONS = 200_000


class Profile:
    """Profiles up to three steps of rank 0 after the first, which compiles, or the only one, into ``logging.profile``.

    The steps take longer than others, and their results are the same.
    """

    def __init__(self, trainer: "RunState") -> None:
        self._trainer, self.folder = trainer, trainer.settings.logging.profile
        self._first = min(trainer.global_step + 1, trainer.settings.run.steps - 1)
        self._profiler: Any = None

    def begin(self) -> None:
        """Before a step."""
        trainer = self._trainer
        if self.folder is None or trainer.rank or trainer.global_step != self._first:
            return
        activities = [ProfilerActivity.CPU]
        if trainer.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profiler.start()

    def end(self) -> None:
        """After a step."""
        if self._trainer.global_step >= self._first + _STEPS:
            self.close()

    def close(self) -> None:
        """Writes the files, if steps were profiled; called at the end of a run, however it ends."""
        if self._profiler is None or self.folder is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        with optional(f"logging.profile {self.folder}", set()):
            profiler.export_chrome_trace(str(self.folder / EVENTS))
            if self._trainer.device.type == "cuda":
                torch.cuda.memory._dump_snapshot(str(self.folder / MEMORY))
        if self._trainer.device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)
