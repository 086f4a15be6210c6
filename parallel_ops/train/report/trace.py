"""A picture and a trace of the pipeline, measured in one step of a run."""

import json
from typing import TYPE_CHECKING

from parallel_ops.pipeline_parallel.trace import simulation_of, times_of
from parallel_ops.planner.pictures.trace import chrome_trace, trace_svg
from parallel_ops.planner.schedules.schedule import simulate
from parallel_ops.train.report.outputs import optional
from parallel_ops.train.step.forward_backward import PipelineForwardBackward

if TYPE_CHECKING:
    from parallel_ops.train.run_state import RunState

# The files in ``logging.trace``.
SVG, EVENTS = "pipeline.svg", "pipeline.json"


class Trace:
    """Records the second step of a run (the first compiles and allocates), or its only one, in ``logging.trace``.

    The picture has the measured pipeline under the simulated one: the same actions with the median time of each pass
    and no time for messages. The other file has the events of Chrome's and Perfetto's trace viewers.
    """

    def __init__(self, trainer: "RunState") -> None:
        self._trainer, self.folder = trainer, trainer.settings.logging.trace
        self._step = min(trainer.global_step + 1, trainer.settings.run.steps - 1)
        self._recorded: PipelineForwardBackward | None = None

    def begin(self) -> None:
        """Before a step."""
        passes = self._trainer.forward_backward
        wanted = self.folder is not None and self._trainer.global_step == self._step
        self._recorded = passes if wanted and isinstance(passes, PipelineForwardBackward) else None
        if self._recorded is not None:
            self._recorded.record()

    def end(self) -> None:
        """After a step; all ranks call it, rank 0 writes."""
        if self._recorded is None:
            return
        timed = self._recorded.timed()
        if self._trainer.rank or self.folder is None:
            return
        plan = self._trainer.settings.plan
        title = f"Step {self._step + 1}: {plan.schedule} on {plan.pp} ranks, {plan.micro_batches} micro-batches"
        with optional(f"logging.trace {self.folder}", set()):
            ran = simulation_of(timed)
            planned = simulate(ran.schedule, times_of(timed))
            texts = {SVG: trace_svg(planned, ran, title=title), EVENTS: json.dumps(chrome_trace(ran))}
            for name, text in texts.items():
                (self.folder / name).write_text(text)
