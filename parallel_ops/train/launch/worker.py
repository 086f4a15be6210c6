"""What one process of a run does: it joins the others, trains, and goes on from a checkpoint where it is told to."""

import contextlib
import math
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel_ops.comm import ParallelMesh
from parallel_ops.train.config import Settings
from parallel_ops.train.launch import resuming
from parallel_ops.train.launch.signals import Stopping
from parallel_ops.train.malloc import keep_freed_memory
from parallel_ops.train.optimizer import hide_hint
from parallel_ops.train.planner_bridge import uses_cuda
from parallel_ops.train.results import Result
from parallel_ops.train.trainer import Trainer


@dataclass(frozen=True)
class Start:
    """How a run is started.

    Attributes:
        resume: go on from a checkpoint: that of ``path``, or the newest in ``checkpoint.folder`` if there is one.
        path: a checkpoint, or a folder of them; ``None`` for ``checkpoint.folder``.
        elastic: where there are other ranks than the plan has, it is chosen anew for them.
        max_restarts: how often processes that are started here begin again, from the last checkpoint, after one failed.
        command: the command line without ``--resume``, for messages; empty where there is none.
    """

    resume: bool = False
    path: Path | None = None
    elastic: bool = False
    max_restarts: int = 0
    command: str = ""


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def train(settings: Settings, start: Start, stopping: Stopping) -> Result:
    """The run on this rank, and in its process group where the plan has several."""
    if not uses_cuda(settings):
        keep_freed_memory()
    with joined(settings) as mesh:
        trainer = Trainer(settings, mesh)
        # A restart of a run that saves nothing begins again.
        if start.resume and (start.path or settings.checkpoint.folder):
            source = resuming.go_on(trainer, start)
            if trainer.done >= settings.run.steps:
                return Result(trainer.done, math.nan, None, source)
        return trainer.train(stopping)


@contextlib.contextmanager
def joined(settings: Settings) -> Iterator[ParallelMesh | None]:
    """This process as a rank of the plan's mesh; ``None`` where it has one. After an error the group is left as it is:
    to destroy it could mean to wait for ranks that are gone."""
    plan = settings.plan
    on_gpu = uses_cuda(settings)
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if plan.gpus == 1 and not under_torchrun():
        yield None
        return
    hide_hint()
    backend = backend_of(on_gpu, offload=plan.offload != "none")
    store, rank, ranks = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    store = dist.PrefixStore(name_of_start(store, rank, ranks), store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    yield ParallelMesh(dp_replicate=plan.dp_replicate, dp_shard=plan.dp_shard, cp=plan.cp, tp=plan.tp)
    dist.destroy_process_group()


def backend_of(on_gpu: bool, *, offload: bool) -> str:
    """What the ranks talk over. Gradients that are offloaded are summed for their norm where they are, on the CPU."""
    if not on_gpu:
        return "gloo"
    return "cpu:gloo,cuda:nccl" if offload else "nccl"


def name_of_start(store: Any, rank: int, ranks: int) -> str:
    """A name for keys that the ranks of this start share, and no start before it had.

    An agent's store outlives restarts, and with it the addresses of the processes before. Their number is no name: each
    agent counts its own, and a change of members does not count (pytorch/pytorch#135712). So each rank asks rank 0,
    which answers until all have said that they heard it: what it finds at first may be the questions of a start before.
    """
    own, question = uuid.uuid4().hex, "parallel_ops/{}/{}".format
    if rank:
        store.set(question(ranks, rank), own)
        name = str(store.get(own).decode())
        store.set(name + own, "heard")
        return name
    waiting = set(range(1, ranks))
    while waiting:
        for other in [other for other in waiting if store.check([question(ranks, other)])]:
            asked = store.get(question(ranks, other)).decode()
            store.set(asked, own)
            if store.check([own + asked]):
                waiting.remove(other)
        time.sleep(0.02 if waiting else 0.0)
    return own
