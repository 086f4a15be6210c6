"""The steps of a run, with what happens between them: evaluation, checkpoints, logs."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator

from parallel_ops.train.checkpoint.checkpoints import CheckpointError, Checkpoints
from parallel_ops.train.checkpoint.description import best_in, steps_in
from parallel_ops.train.checkpoint.resume import checkpointer, save
from parallel_ops.train.launch.signals import GracefulShutdown
from parallel_ops.train.report import outputs
from parallel_ops.train.report.metrics import Metrics
from parallel_ops.train.report.profile import Profile
from parallel_ops.train.report.progress import Progress
from parallel_ops.train.report.trace import Trace
from parallel_ops.train.results import NotFinite, Result, Step
from parallel_ops.train.run_state import RunState

# Seconds before the last try to save, in which a file server may come back.
_PAUSE_SECONDS = 5.0


@contextlib.contextmanager
def _observed(*observers: Trace | Profile) -> Iterator[None]:
    """A step that is traced and profiled."""
    for observer in observers:
        observer.begin()
    yield
    for observer in observers:
        observer.end()


@contextlib.contextmanager
def _saving(trainer: RunState, store: Checkpoints) -> Iterator[None]:
    """Saves again if a save that the block starts or waits for fails: at once, then after a pause. All ranks do.

    Raises:
        CheckpointError: The last save fails too.
    """
    try:
        yield
        return
    except CheckpointError as error:
        failure = error
    for pause in (0.0, _PAUSE_SECONDS):
        if trainer.rank == 0:
            outputs.warn(f"{failure}; saving step {trainer.global_step} {f'in {pause:g} s' if pause else 'now'}")
        time.sleep(pause)
        try:
            save(trainer, store)
            store.wait()
            return
        except CheckpointError as error:
            failure = error
    raise failure


def _save_last(trainer: RunState, store: Checkpoints) -> None:
    with _saving(trainer, store):
        if trainer.saved_step != trainer.global_step:
            save(trainer, store)
        trainer.activity("writing the last checkpoint", slow=True)
        store.wait()


@contextlib.contextmanager
def _closed(trainer: RunState, store: Checkpoints | None) -> Iterator[None]:
    """Ends what works beside the steps. After an error, that of the current save is a warning."""
    try:
        yield
    except BaseException:
        if store is not None:
            try:
                store.wait()
            except CheckpointError as error:
                outputs.warn(str(error))
        raise
    finally:
        trainer.loader.close()


def take_steps(trainer: RunState, stopping: GracefulShutdown) -> Result:
    """Takes the remaining steps; see ``Trainer.train``."""
    settings, evaluation = trainer.settings, trainer.evaluation
    interval, keep_best = settings.checkpoint.interval, settings.checkpoint.keep_best
    last: Step | None = None
    evaluated: float | None = None
    outputs.check(settings)
    store = checkpointer(trainer)
    with contextlib.ExitStack() as stack:
        _begin(trainer, store, stack)
        signals = stack.enter_context(stopping)
        progress = stack.enter_context(Progress(trainer))
        metrics = stack.enter_context(Metrics(trainer))
        trace, profile = Trace(trainer), Profile(trainer)
        stack.callback(profile.close)
        with _closed(trainer, store):
            while trainer.global_step < settings.run.steps:
                with _observed(trace, profile):
                    step = trainer.step(
                        stop_signal=lambda: signals.stop_signal, failed=lambda: store is not None and store.failed()
                    )
                    problem = check_finite(trainer, step)
                is_best = False
                if (
                    problem is None
                    and step.stop is None
                    and evaluation is not None
                    and evaluation.due(trainer.global_step)
                ):
                    progress.says("evaluation")
                    evaluated = trainer.evaluate()
                    step = dataclasses.replace(step, evaluation_loss=evaluated)
                    is_best = evaluation.is_best(evaluated)
                metrics.add(step)
                progress.add(step, stops=problem is not None)
                if problem is not None:
                    raise problem
                last = step
                if store is not None and step.save_failed:
                    with _saving(trainer, store):
                        store.wait()
                if step.stop is not None:
                    break
                due = interval and trainer.global_step % interval == 0
                if store is not None and (due or (is_best and keep_best)) and trainer.saved_step != trainer.global_step:
                    progress.says("saving a checkpoint")
                    with _saving(trainer, store):
                        save(trainer, store)
            if store is not None:
                progress.says("writing the last checkpoint")
                _save_last(trainer, store)
        trainer.activity("writing what was measured", slow=True)
    result = _result(trainer, store, last, evaluated)
    progress.end(result)
    return result


def check_finite(trainer: RunState, step: Step) -> NotFinite | None:
    """Returns the error that ends the run after a step, if any."""
    if math.isfinite(step.grad_norm) and math.isfinite(step.loss):
        return None
    first = trainer.samples_seen - trainer.settings.plan.global_batch
    where = f"step {step.number}, samples {first} to {trainer.samples_seen - 1}"
    scale = trainer.scale
    if scale.growth_interval and math.isfinite(step.loss):
        if scale.is_exhausted:
            return NotFinite(f"{where}: gradients are not finite at a loss scale of {scale.scale:g} either")
        return None
    if trainer.settings.run.on_nan == "stop":
        kept = "; no parameter was changed" if step.skipped else ""
        return NotFinite(f"{where}: loss {step.loss}, gradient norm {step.grad_norm}{kept}")
    return None


def _begin(trainer: RunState, store: Checkpoints | None, stack: contextlib.ExitStack) -> None:
    if store is not None:
        stack.callback(store.close)
        store.begin(trainer.global_step)
    if trainer.evaluation is not None:
        trainer.evaluation.begin()


def _result(trainer: RunState, store: Checkpoints | None, last: Step | None, evaluated: float | None) -> Result:
    found = {} if store is None else steps_in(store.folder)
    return Result(
        step=trainer.global_step,
        loss=math.nan if last is None else last.loss,
        stopped=None if last is None else last.stop,
        checkpoint=found[max(found)] if found else None,
        evaluation_loss=evaluated,
        best=best_in(store.folder) if store is not None and store.keep_best else None,
    )
