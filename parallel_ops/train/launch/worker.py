"""One process of a run: joins the process group, resumes from a checkpoint if requested, and trains."""

import contextlib
import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from parallel_ops._internal.command_line import waiting
from parallel_ops.comm import ParallelMesh, flight_recorder
from parallel_ops.comm.nccl.connect import CAPTURES, set_environment
from parallel_ops.train.config import Settings
from parallel_ops.train.launch import resuming
from parallel_ops.train.launch.consistency import Comparison, values_of
from parallel_ops.train.launch.malloc import keep_freed_memory
from parallel_ops.train.launch.options import Start
from parallel_ops.train.launch.rendezvous import first_rank, meet, under_torchrun
from parallel_ops.train.launch.settings import RunSettings
from parallel_ops.train.launch.signals import GracefulShutdown
from parallel_ops.train.launch.watchdog import Activity, Watchdog, group_timeout, longest
from parallel_ops.train.parallelize_model import MESH_SIZES
from parallel_ops.train.planner_bridge import uses_cuda
from parallel_ops.train.results import Result
from parallel_ops.train.step.optimizer import hide_hint
from parallel_ops.train.trainer import Trainer


def run_rank(
    settings: Settings, start: Start, stopping: GracefulShutdown, report: Callable[[str], None],
    note: Callable[[str], None] | None = None,
) -> Result:  # fmt: skip
    """Runs this rank, in a process group if the plan has several ranks.

    Args:
        report: Called with the reason, from a thread of ``Watchdog``, before it ends this process.
        note: Called with what this rank does, about once a second.

    Raises:
        Disagreement: Settings differ between ranks. PeerError: Another rank is lost.
        Otherwise the errors of ``Trainer``.
    """
    if start.trainer is None and not uses_cuda(settings):
        keep_freed_memory()
    with contextlib.ExitStack() as stack:
        mesh, activity = stack.enter_context(joined(settings, start, report, note))
        with waiting(lambda: activity.now[1]) if first_rank() else contextlib.nullcontext():
            trainer = stack.enter_context((start.trainer or Trainer)(settings, mesh, activity=activity))
            # A restarted run without checkpoints starts from the beginning.
            if start.resume and (start.path or settings.checkpoint.dir):
                source = resuming.resume_trainer(trainer, start)
                if trainer.global_step >= settings.run.steps:
                    return Result(trainer.global_step, math.nan, None, source)
        return trainer.train(stopping)


def gpu_of_rank() -> int:
    """Index of this rank's GPU: ``LOCAL_RANK``, or 0 if the launcher lets each process see its own GPU alone.

    Raises:
        ValueError: The variable is missing where there are several GPUs, or the node has more ranks than GPUs.
    """
    given, visible = os.environ.get("LOCAL_RANK"), torch.cuda.device_count()
    if not given and visible > 1 and under_torchrun():
        raise ValueError(f"LOCAL_RANK is not set, and this torch sees {visible} GPUs: each process needs its own")
    local = int(given or 0)
    if local >= visible > 1:
        raise ValueError(
            f"LOCAL_RANK is {local}, but this process sees {visible} GPUs; start at most as many ranks on a node as it "
            "has GPUs, or let each process see its own alone (CUDA_VISIBLE_DEVICES, srun --gpus-per-task=1)"
        )
    return 0 if visible == 1 else local


@contextlib.contextmanager
def joined(
    settings: Settings, start: Start, report: Callable[[str], None], note: Callable[[str], None] | None = None
) -> Iterator[tuple[ParallelMesh | None, Activity]]:
    """Joins the process group of the plan; the mesh is ``None`` for one rank without torchrun.

    After an error the group is not destroyed: that could wait for lost ranks.
    """
    plan = settings.plan
    on_gpu = uses_cuda(settings)
    if plan.gpus == 1 and not under_torchrun():
        if on_gpu:
            torch.cuda.set_device(gpu_of_rank())
        yield None, Activity()
        return
    hide_hint()
    prepare_captures(settings)
    backend = backend_of(on_gpu, offload=plan.offload != "none")
    timeout, seconds = settings.run.timeout, longest(settings.run.timeout)
    store, rank, ranks = meet(seconds)
    with Comparison(store, rank, ranks, seconds) as compare:
        if on_gpu:
            torch.cuda.set_device(gpu_of_rank())
        source = resuming.source_of(settings, start) if start.resume else None
        started = {
            "--resume": start.resume,
            "--elastic": start.elastic,
            "--new-phase": start.new_phase,
            "device": "cuda" if on_gpu else "cpu",
        }
        compare(values_of(settings) | started | {"checkpoint": None if source is None else source.name})
    recorded = functools.partial(_recorded, report, _record_folder(settings), rank)
    watch = Watchdog(dist.PrefixStore("watch", store), rank, ranks, timeout, recorded, note)  # type: ignore[attr-defined]
    limit = group_timeout(timeout)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
        sizes = {name: getattr(plan, name) for name in MESH_SIZES}
        yield ParallelMesh(**sizes, timeout=limit), watch.activity
        watch.activity("ending", slow=True)
        dist.destroy_process_group()
    except Exception as error:
        watch.failed(error)
        raise
    watch.close()


def _record_folder(settings: Settings) -> Path:
    """Where torch's flight recorder is written: beside the log, the checkpoints, or among temporary files."""
    log, checkpoints = settings.logging.jsonl, settings.checkpoint.dir
    beside = log.parent if log is not None else checkpoints
    return (beside or Path(tempfile.gettempdir()) / f"parallel_ops-{os.getppid()}") / "flight_recorder"


def _recorded(report: Callable[[str], None], folder: Path, rank: int, reason: str) -> None:
    report(f"{reason}{flight_recorder.report(folder, rank)}")


def propagate(error: BaseException) -> None:
    """Makes the other ranks, which are about to join, raise an error of this rank."""
    seconds = RunSettings().timeout or 0.0
    # This rank raises its own error, whether or not the others arrive.
    with contextlib.suppress(RuntimeError):
        Comparison(*meet(seconds), seconds).fail(error)


def prepare_captures(settings: Settings) -> None:
    """Sets what NCCL must know of CUDA graphs, if the run has them."""
    if settings.run.cuda_graph:
        set_environment(CAPTURES)


def backend_of(on_gpu: bool, *, offload: bool) -> str:
    """The backend of the process group. The norm of offloaded gradients is reduced on the CPU, where they are."""
    if not on_gpu:
        return "gloo"
    return "cpu:gloo,cuda:nccl" if offload else "nccl"
