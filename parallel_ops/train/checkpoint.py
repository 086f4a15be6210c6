"""Checkpoints of a training, from which it goes on as if it had not stopped, on any number of ranks.

    FOLDER/step-00000050/run.json       the step, the model's shape, the names of the runs
    FOLDER/step-00000050/tp2/           model, optimizer and generators of one run, by torch.distributed.checkpoint
    FOLDER/.step-00000100.part/         one that is being written

A checkpoint gets its name when all of it is written, so a training that is killed leaves the ones before as they were.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from parallel_ops.train.config import TrainConfig
from parallel_ops.train.loop import Trainer

_STEP, _PART = re.compile(r"step-(\d{8,})"), re.compile(r"\.step-\d{8,}\.part")
_DESCRIPTION = "run.json"


def save(trainer: Trainer, path: Path) -> None:
    """Saves one run to a folder; all of its ranks call it.

    Raises:
        RuntimeError: it cannot be written; with the reason, on every rank.
    """
    with _reported(f"cannot save to {path}"):
        save_state(_state(trainer), checkpoint_id=path, process_group=trainer.group, no_dist=trainer.group is None)


def load(trainer: Trainer, path: Path) -> None:
    """Gives a trainer what ``save`` has saved, on as many ranks or others; all of its ranks call it.

    Raises:
        RuntimeError: it cannot be read, or is of another model; with the reason, on every rank.
    """
    state = _state(trainer)
    with _reported(f"cannot load {path}"):
        load_state(state, checkpoint_id=path, process_group=trainer.group, no_dist=trainer.group is None)
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    trainer.done = state["done"]
    generators = dict(state["generators"])
    trainer.generator.set_state(generators["batches"])
    torch.set_rng_state(generators["cpu"])
    if trainer.device.type == "cuda" and "cuda" in generators:
        torch.cuda.set_rng_state(generators["cuda"], trainer.device)


def _state(trainer: Trainer) -> dict[str, Any]:
    generators = {"batches": trainer.generator.get_state(), "cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(trainer.device)
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    return {
        "model": model,
        "optimizer": optimizer,
        "done": trainer.done,
        # A tuple is saved in one piece: which generators there are depends on the device.
        "generators": tuple(generators.items()),
    }


@contextlib.contextmanager
def _reported(failure: str) -> Iterator[None]:
    """Torch's collected errors as one of ours; no warning that a run of one process has no process group."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(reason, KeyboardInterrupt):
            raise reason from None
        raise RuntimeError(f"{failure}: rank {rank}: {reason}") from error


def due(config: TrainConfig, step: int) -> bool:
    """Whether there is a checkpoint after so many steps."""
    if config.save is None:
        return False
    return step == config.steps or (config.every > 0 and step % config.every == 0)


def part(config: TrainConfig, step: int) -> Path:
    """Where the runs save a checkpoint that is not complete yet."""
    assert config.save is not None
    return config.save / f".step-{step:08}.part"


def complete(config: TrainConfig, step: int, runs: Sequence[str]) -> None:
    """Gives a checkpoint its name, after all runs have saved their part."""
    assert config.save is not None
    path = part(config, step)
    description = {"step": step, "model": dataclasses.asdict(config.model), "runs": list(runs)}
    with open(path / _DESCRIPTION, "w") as file:
        file.write(json.dumps(description, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    path.rename(config.save / f"step-{step:08}")


def clear(config: TrainConfig) -> None:
    """Removes what a training that was killed has left half written."""
    if config.save is not None and config.save.is_dir():
        for path in config.save.iterdir():
            if _PART.fullmatch(path.name):
                shutil.rmtree(path)


def newest(folder: Path) -> Path:
    """The checkpoint of the most steps in a folder.

    Raises:
        FileNotFoundError, NotADirectoryError, OSError: as the file system says, naming the folder.
        ValueError: no checkpoint in it.
    """
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist")
    steps = _steps(folder)
    if not steps:
        raise ValueError(f"{folder} has no checkpoint in it: no folder named step-00000001 or the like")
    return steps[max(steps)]


def _steps(folder: Path) -> dict[int, Path]:
    return {int(m[1]): path for path in folder.iterdir() if (m := _STEP.fullmatch(path.name))}


def first_step(config: TrainConfig) -> int:
    """How many steps were taken before: 0, or those of the checkpoint that the run goes on from."""
    return 0 if config.resume is None else _describe(config.resume)["step"]


def source(checkpoint: Path, name: str) -> Path:
    """What a run goes on from: itself, or the last of the runs where it was not among them."""
    runs = _describe(checkpoint)["runs"]
    return checkpoint / (name if name in runs else runs[-1])


def check(config: TrainConfig) -> None:
    """Whether a training can go on from where it is to, and save where it is to.

    Raises:
        ValueError, OSError: in one line, naming the folder.
    """
    start = first_step(config)
    if config.resume is not None:
        saved, wanted = _describe(config.resume)["model"], dataclasses.asdict(config.model)
        for name, value in wanted.items():
            if saved.get(name) != value:
                raise ValueError(f"{config.resume} is of a model with {name} {saved.get(name)}, not {value}")
        if start >= config.steps:
            raise ValueError(f"{config.resume} has {start} steps behind it, of {config.steps} in all: raise --steps")
    if config.save is not None:
        config.save.mkdir(parents=True, exist_ok=True)
        if not os.access(config.save, os.W_OK):
            raise PermissionError(f"{config.save} cannot be written")
        later = [step for step in _steps(config.save) if step > start]
        if later:
            raise ValueError(
                f"{config.save} has a checkpoint of step {max(later)} already: name another folder, or go on from it "
                f"with --resume {config.save}"
            )


def _describe(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / _DESCRIPTION
    try:
        description = json.loads(path.read_text())
        if not (isinstance(description["step"], int) and description["runs"] and description["model"]):
            raise ValueError("a value is missing")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not of a checkpoint: {error!r}") from error
    return description
