"""The steps of a run, with what happens between them: evaluation, checkpoints, logs."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Protocol

from parallel_ops.train import outputs
from parallel_ops.train.checkpoint.checkpoints import Checkpoints
from parallel_ops.train.checkpoint.description import best_in, steps_in
from parallel_ops.train.data.loader import Loader
from parallel_ops.train.evaluation import Evaluation
from parallel_ops.train.launch.signals import Stopping
from parallel_ops.train.metrics import Metrics
from parallel_ops.train.profile import Profile
from parallel_ops.train.progress import Progress
from parallel_ops.train.results import NotFinite, Result, Step
from parallel_ops.train.run_state import RunState
from parallel_ops.train.trace import Trace


class Run(RunState, Protocol):
    """What the loop needs of ``Trainer``."""

    saved_step: int

    @property
    def evaluation(self) -> Evaluation | None: ...
    @property
    def loader(self) -> Loader: ...
    def step(self, *, asked: Callable[[], str | None]) -> Step: ...
    def problem(self, step: Step) -> NotFinite | None: ...
    def evaluate(self) -> float: ...
    def open_store(self) -> Checkpoints | None: ...
    def save_in(self, store: Checkpoints) -> None: ...


@contextlib.contextmanager
def _observed(*observers: Trace | Profile) -> Iterator[None]:
    """A step that is traced and profiled."""
    for observer in observers:
        observer.begin()
    yield
    for observer in observers:
        observer.end()


def _finish(trainer: Run, store: Checkpoints | None, progress: Progress) -> None:
    """Waits for what is written beside the steps."""
    if store is not None:
        trainer.activity("writing the last checkpoint", slow=True)
        progress.says("writing the last checkpoint")
        store.wait()


def take_steps(trainer: Run, stopping: Stopping) -> Result:
    """Takes the remaining steps; see ``Trainer.train``."""
    settings, evaluation = trainer.settings, trainer.evaluation
    interval, keep_best = settings.checkpoint.interval, settings.checkpoint.keep_best
    last: Step | None = None
    evaluated: float | None = None
    outputs.check(settings)
    store = trainer.open_store()
    if store is not None:
        store.begin(trainer.global_step)
    if evaluation is not None:
        evaluation.begin()
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(stopping)
        progress = stack.enter_context(Progress(trainer))
        metrics = stack.enter_context(Metrics(trainer))
        trace, profile = Trace(trainer), Profile(trainer)
        stack.callback(profile.close)
        try:
            while trainer.global_step < settings.run.steps:
                with _observed(trace, profile):
                    step = trainer.step(asked=lambda: signals.asked)
                    problem = trainer.problem(step)
                is_best = False
                if problem is None and step.stop is None and evaluation is not None and evaluation.due():
                    progress.says("evaluation")
                    evaluated = trainer.evaluate()
                    step = dataclasses.replace(step, evaluation_loss=evaluated)
                    is_best = evaluation.is_best(evaluated)
                metrics.add(step)
                progress.add(step, stops=problem is not None)
                if problem is not None:
                    raise problem
                last = step
                if step.stop is not None:
                    break
                due = interval and trainer.global_step % interval == 0
                if store is not None and (due or (is_best and keep_best)):
                    progress.says("saving a checkpoint")
                    trainer.save_in(store)
            if store is not None and trainer.saved_step != trainer.global_step:
                trainer.save_in(store)
        finally:
            trainer.loader.close()
            _finish(trainer, store, progress)
        trainer.activity("writing what was measured", slow=True)
    found = {} if store is None else steps_in(store.folder)
    result = Result(
        step=trainer.global_step,
        loss=math.nan if last is None else last.loss,
        stopped=None if last is None else last.stop,
        checkpoint=found[max(found)] if found else None,
        evaluation_loss=evaluated,
        best=best_in(store.folder) if store is not None and keep_best else None,
    )
    progress.end(result)
    return result
