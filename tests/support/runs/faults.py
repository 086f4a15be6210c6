"""Runs of ``Trainer`` that are stopped, killed or cannot write, and many in one process."""

import contextlib
import gc
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from parallel_ops.comm import ParallelMesh
from parallel_ops.train import Trainer, loop
from parallel_ops.train.checkpoint.writer import CheckpointWriter
from parallel_ops.train.config import Settings
from parallel_ops.train.report import outputs
from parallel_ops.train.results import Result
from support.runs.trainer import trainer_of


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Writes beyond ``size`` bytes of a file fail in the block, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def flip(file: Path) -> None:
    """Changes a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def train_with_a_signal(rank: int, settings: Settings, number: int, at: int) -> Result:
    """The last rank alone gets a signal, in its step ``at``."""
    trainer = trainer_of(settings)
    take = trainer.step

    def step(**options: Any) -> Any:
        if trainer.global_step == at - 1 and rank == trainer.world - 1:
            os.kill(os.getpid(), number)
        return take(**options)

    with mock.patch.object(trainer, "step", step):
        return trainer.train()


def train_killed(rank: int, settings: Settings, killed: tuple[int, ...], save: int) -> None:
    """Ranks that end in the middle of the save of this number, after their own data are written."""
    with _in_saves(range(save, save + 1), lambda: os.kill(os.getpid(), signal.SIGKILL) if rank in killed else None):
        trainer_of(settings).train()


def train_on_a_full_disk(rank: int, settings: Settings, save: int) -> Result:
    """From this save on no file can have more than some bytes, as the system says it."""
    with (
        contextlib.ExitStack() as disk,
        _in_saves(range(save, save + 1), lambda: disk.enter_context(file_limit(4096)), before=True),
        mock.patch.object(loop, "_PAUSE_SECONDS", 0.1),
    ):
        return trainer_of(settings).train()


def train_where_saves_fail(rank: int, settings: Settings, failing: int, failures: int) -> tuple[int, list[str]]:
    """The last rank cannot write from its save number ``failing`` on, as often as ``failures`` says."""
    said = list[str]()

    def fail() -> None:
        if rank == dist.get_world_size() - 1:
            raise OSError(5, "Input/output error")

    with (
        _in_saves(range(failing, failing + failures), fail, before=True),
        mock.patch.object(loop, "_PAUSE_SECONDS", 0.1),
        mock.patch.object(outputs, "warn", said.append),
    ):
        return trainer_of(settings).train().step, said


@contextlib.contextmanager
def _in_saves(numbers: range, act: Callable[[], Any], *, before: bool = False) -> Any:
    write, count = CheckpointWriter.write_data, 0

    def write_data(self: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        if before and count in numbers:
            act()
        written = write(self, *args)
        if not before and count in numbers:
            act()
        return written

    with mock.patch.object(CheckpointWriter, "write_data", write_data):
        yield


def many_trainers(rank: int, settings: Settings, number: int) -> tuple[tuple[int, ...], tuple[int, ...], list[str]]:
    """Groups, files and threads before and after runs in one process, and the last checkpoint of each run."""

    def count() -> tuple[int, ...]:
        gc.collect()
        groups = len(dist.distributed_c10d._world.pg_map)
        return groups, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def run(index: int) -> str:
        folder = settings.checkpoint.dir / str(index)
        own = settings.model_copy(update={"checkpoint": settings.checkpoint.model_copy(update={"dir": folder})})
        mesh = ParallelMesh(dp_shard=2)
        with Trainer(own, mesh) as trainer:
            result = trainer.train()
        mesh.close()
        assert result.checkpoint is not None
        return result.checkpoint.name

    run(-1)
    before = count()
    saved = [run(index) for index in range(number)]
    end, after = time.monotonic() + 10, count()
    while time.monotonic() < end and any(b < a for b, a in zip(before, after, strict=True)):
        time.sleep(0.1)  # threads of a backend end a moment after their group
        after = count()
    return before, after, saved
