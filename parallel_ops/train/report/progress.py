"""Console output of a run, on rank 0: its description, its progress and its result.

On a terminal a bar shows the last step, with lines above it for steps that are not finite. A file or a pipe receives a
line every ``logging.interval`` steps.
"""

import contextlib
import math
import sys
import time
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from parallel_ops._internal.command_line import terminal_console
from parallel_ops.train.report import description, outputs
from parallel_ops.train.report.throughput import peak_share

if TYPE_CHECKING:
    from parallel_ops.train.results import Result, Step
    from parallel_ops.train.run_state import RunState

# Recent steps, whose median time gives the remaining time.
_RECENT = 50
# Seconds between two updates of the bar. The main thread draws it: another would compete with kernel launches.
_REFRESH = 0.1
# Columns at which the bar has room for all values of a line.
_WIDE = 140


class Progress:
    """Prints the progress of a trainer."""

    def __init__(self, trainer: "RunState") -> None:
        self.trainer, self.settings = trainer, trainer.settings
        self._seconds: list[float] = []
        self._bar: Any = None
        self._peak_share = peak_share(trainer)
        self._first, self._start = trainer.global_step, time.perf_counter()
        self._since, self._drawn, self._last = (self._first, self._start), -math.inf, self._start

    def __enter__(self) -> "Progress":
        if self.trainer.rank == 0:
            print(description.text(description.start_lines(self.trainer)), flush=True)
            evaluation = self.trainer.evaluation
            if (reason := self.trainer.eager_reason) is not None:
                outputs.warn(f"run.cuda_graph: nothing is captured: {reason}")
            for warning in description.warnings(
                self.trainer.samples, None if evaluation is None else evaluation.samples
            ):
                print(warning, file=sys.stderr, flush=True)
            self._bar = _bar(self.settings.run.steps, self.trainer.global_step)
        self._first, self._start = self.trainer.global_step, time.perf_counter()
        self._since = self._first, self._start
        return self

    def add(self, step: "Step", *, stops: bool = False) -> None:
        """Prints a step.

        Args:
            stops: The step is not finite and ends the run.
        """
        if self.trainer.rank:
            return
        self._seconds = [*self._seconds[1 - _RECENT :], step.seconds]
        now = self._last = time.perf_counter()
        last = step.number == self.settings.run.steps
        if self._bar is not None and (last or now - self._drawn > _REFRESH):
            self._drawn = now
            parts = self._parts(step, step.tokens / median(self._seconds))
            shown = parts if self._bar.console.width >= _WIDE else [parts[0], parts[3], parts[-1]]
            text = "  ".join([f"step {step.number}/{self.settings.run.steps}", *shown])
            self._bar.update(0, completed=step.number, text=text, refresh=True)
        unusual = step.skipped or stops or step.without_target or step.redone
        if (
            unusual
            or step.evaluation_loss is not None
            or (self._bar is None and (step.number % self.settings.logging.interval == 0 or last))
        ):
            self._line(step, now, unusual, stops)

    def says(self, what: str) -> None:
        """Shows on the bar what comes between steps, such as a save."""
        if self._bar is not None:
            text = f"step {self.trainer.global_step}/{self.settings.run.steps}  {what}"
            self._bar.update(0, completed=self.trainer.global_step, text=text, refresh=True)

    def end(self, result: "Result") -> None:
        """Prints the result, after the bar is gone and all files are written."""
        if self.trainer.rank == 0:
            seconds = self._last - self._start
            print(description.text(description.end_lines(self.trainer, result, self._first, seconds)), flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _line(self, step: "Step", now: float, unusual: bool, stops: bool) -> None:
        first, start = self._since
        self._since = step.number, now
        parts = [f"step {step.number}/{self.settings.run.steps}"]
        parts += self._parts(step, step.tokens * (step.number - first) / (now - start))
        if step.evaluation_loss is not None:
            evaluation = self.trainer.evaluation
            none = "" if evaluation is None or evaluation.targets else " (no target counts in the loss)"
            parts.insert(2, f"evaluation loss {step.evaluation_loss:.4f}{none}")
        if step.without_target:
            parts += ["no target of this step counts in the loss"]
        if step.redone:
            parts += ["more rows for an expert than run.cuda_graph_capacity, taken again without a graph"]
        if unusual and not math.isfinite(step.loss + step.grad_norm):
            end = self.trainer.samples_seen
            samples = f"samples {end - self.settings.plan.global_batch} to {end - 1}"
            parts += [f"not finite, {'the run stops' if stops else 'skipped'}: {samples}"]
        print("  ".join(parts), flush=True)

    def _parts(self, step: "Step", rate: float) -> list[str]:
        left = timedelta(seconds=round((self.settings.run.steps - step.number) * median(self._seconds)))
        parts = [f"loss {step.loss:.4f}", f"norm {step.grad_norm:.3g}", f"lr {step.lr:.2e}", f"{rate:,.0f} tokens/s"]
        parts += [f"MFU {rate * self._peak_share:.1%}"] if self._peak_share else []
        memory = peak_memory(self.trainer.device)
        parts += [] if memory is None else [f"{memory / 2**30:.2f} GiB"]
        return [*parts, f"{left} left"]


def _bar(steps: int, done: int) -> Any:
    """A bar on the terminal; ``None`` if stdout is not a terminal."""
    if not sys.stdout.isatty():
        return None
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = terminal_console(margin=5)  # room for ``^C`` on the line of the bar
    if console.is_dumb_terminal:
        return None
    columns = (BarColumn(None), TextColumn("{task.fields[text]}", markup=False))
    bar = Bar(*columns, console=console, auto_refresh=False, transient=True, expand=True)
    bar.add_task("", total=steps, completed=done, text=f"step {done}/{steps}")
    bar.start()
    bar.refresh()
    return bar


def peak_memory(device: torch.device) -> int | None:
    """Peak memory in bytes: of tensors on a GPU, of the whole process on a CPU; ``None`` if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # On Linux not getrusage's ru_maxrss, which a child process inherits from its parent.
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None
