"""The runs of the demo: one model trained in several ways, each by the trainer's launcher in processes of its own.

The runs take turns as in ``harness.timing``, one step each on the same batch. The turns are keys of a store: each rank
waits for its next one, takes a step and sets its result.
"""

import contextlib
import functools
import json
import math
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.demo.baseline import PlainTransformer
from benchmarks.demo.data import load_text
from benchmarks.demo.matmul_floor import Products
from benchmarks.harness.timing import order
from parallel_ops.comm import ParallelMesh
from parallel_ops.models import Transformer
from parallel_ops.train.config import Settings
from parallel_ops.train.data.token_file import TokenFile
from parallel_ops.train.data.tokens import TokenStream
from parallel_ops.train.launch import start as launch
from parallel_ops.train.launch.local import PLAIN, Failure
from parallel_ops.train.launch.options import Start
from parallel_ops.train.launch.signals import GracefulShutdown
from parallel_ops.train.launch.watchdog import longest
from parallel_ops.train.parallelize_model import PRECISIONS
from parallel_ops.train.report.progress import peak_memory
from parallel_ops.train.results import Result
from parallel_ops.train.trainer import Trainer

# The models that train on one process: plain PyTorch and this package, each eager and compiled whole.
ALONE = ("plain", "compiled", "fused", "fused-compiled")
# Not a model: the matmuls of a step, which every model computes.
PRODUCTS = "products"
COMPILED = ("compiled", "fused-compiled")
# Seconds from one look at the results of a turn to the next, and for processes to end by themselves.
_POLL, _GRACE = 0.01, 10.0
_FOREVER = timedelta(seconds=longest(None))


@dataclass
class Run:
    """One model's training: per step the loss in nats per byte and the seconds; the peak memory in bytes."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_memory: int | None = None


def demo_trainer(settings: Settings, kind: str = "fused", mesh: ParallelMesh | None = None, **options: Any) -> Trainer:
    """A trainer of one of the demo's models, ``kind`` of ``ALONE``. All have the same weights and samples."""
    text = load_text(settings.data.paths[0])
    stream = TokenStream.of([TokenFile(Path(), text, np.array([len(text)]))])
    model: nn.Module | None = None
    if kind in ("plain", "compiled"):
        torch.manual_seed(settings.run.seed)
        weights = Transformer(settings.config).state_dict()
        model = PlainTransformer(settings.config)
        model.load_state_dict(weights)
    trainer = Trainer(settings, mesh, model=model, stream=stream, **options)
    if kind in COMPILED:
        trainer.model.compile()
    return trainer


class _Rank(contextlib.AbstractContextManager["_Rank"]):
    """A rank of the run ``name``, in the place of ``Trainer``: it steps when the store at ``port`` has its turn."""

    def __init__(
        self, name: str, port: int, settings: Settings, mesh: ParallelMesh | None = None, **options: Any
    ) -> None:
        self.name, self.port, self.settings = name, port, settings
        self.steps: Trainer | Products
        if name == PRODUCTS:
            self.steps = Products(settings)
            return
        self.steps = demo_trainer(settings, name if name in ALONE else "fused", mesh, **options)
        if name in COMPILED:
            _compile(self.steps)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(self.steps, Trainer):
            self.steps.__exit__(kind, error, trace)

    def train(self, _: GracefulShutdown) -> Result:
        rank = dist.get_rank() if dist.is_initialized() else 0
        store = _store(self.name, dist.TCPStore("localhost", self.port, timeout=_FOREVER))  # type: ignore[attr-defined]
        store.set(f"ready/{rank}", "null")
        for number in range(self.settings.run.steps):
            store.wait([f"turn/{number}"], _FOREVER)
            step = self.steps.step()
            store.set(f"{number}/{rank}", json.dumps([step.loss, step.seconds]))
        store.set(f"memory/{rank}", json.dumps(peak_memory(self.steps.device)))
        return Result(self.settings.run.steps, math.nan, None, None)


def _compile(trainer: Trainer) -> None:
    """Compiles a step by a forward and backward that change nothing: runs that start together compile side by side."""
    batch = trainer.loader.step(trainer.samples_seen)[0].to(trainer.device)
    dtype = PRECISIONS[trainer.settings.plan.dtype]
    with torch.autocast(trainer.device.type, dtype=dtype, enabled=dtype is not torch.float32):
        loss: Tensor = trainer.model(batch.tokens, batch.targets)
    loss.backward()
    trainer.model.zero_grad()


def _store(name: str, store: Any) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _serve(name: str, settings: Settings, port: int) -> None:
    """The main function of the process that launches a run."""
    try:
        launch.run(settings, Start(trainer=functools.partial(_Rank, name, port)))
    except KeyboardInterrupt:
        sys.exit(1)
    except Exception as error:
        reason = str(error)
        if not isinstance(error, (Failure, *PLAIN)):
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
        print(getattr(error, "trace", ""), end="", file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):  # the demo has ended
            store = dist.TCPStore("localhost", port)  # type: ignore[attr-defined]
            _store(name, store).set("failed", reason.partition("\n")[0])
        sys.exit(1)


class _Launched:
    """The processes of one run."""

    def __init__(self, name: str, settings: Settings, store: Any) -> None:
        self.run, self.ranks, self.store = Run(name), settings.plan.gpus, _store(name, store)
        # Forks of a process that has imported what all need, which takes seconds, and has done nothing else: a fork of
        # this one would carry its memory and break CUDA and OpenMP.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.demo.runs"])
        self.process: BaseProcess = context.Process(target=_serve, args=(name, settings, store.port))
        self.process.start()

    def results(self, key: str) -> list[Any]:
        """The values of all ranks under a key. RuntimeError: the run ended before that."""
        keys = [f"{key}/{rank}" for rank in range(self.ranks)]
        while not self.store.check(keys):
            if not self.process.is_alive() and not self.store.check(keys):  # which may be the last that it set
                failed = self.store.check(["failed"])
                reason = self.store.get("failed").decode() if failed else f"exit code {self.process.exitcode}"
                raise RuntimeError(f"the {self.run.name} run ended early: {reason}")
            time.sleep(_POLL)
        return [json.loads(self.store.get(name)) for name in keys]

    def step(self, number: int) -> None:
        self.store.set(f"turn/{number}", "")
        losses, seconds = zip(*self.results(str(number)), strict=True)
        self.run.losses.append(losses[0])
        self.run.seconds.append(max(seconds))


def train(each: Mapping[str, Settings], on_step: Callable[[list[Run]], None] = lambda _: None) -> list[Run]:
    """Trains every run, in lock-step.

    Args:
        each: Settings by name: one of ``ALONE`` or ``PRODUCTS`` on one process, any other name in parallel.
        on_step: Called with the runs so far after each step of all of them.

    Raises:
        RuntimeError: A run ended early; the message has its reason.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    launched: dict[str, _Launched] = {}
    grace = 0.0
    try:
        for name, settings in each.items():
            launched[name] = _Launched(name, settings, store)
        runs = [one.run for one in launched.values()]
        for one in launched.values():
            one.results("ready")  # model built, nothing timed yet
        for number in range(next(iter(each.values())).run.steps):
            for name in order(list(launched), number):
                launched[name].step(number)
            on_step(runs)
        for one in launched.values():
            memory = one.results("memory")
            one.run.peak_memory = None if None in memory else max(memory)
        grace = _GRACE
        return runs
    finally:
        deadline = time.monotonic() + grace
        for one in launched.values():
            one.process.join(max(0.0, deadline - time.monotonic()))
            one.process.terminate()
        for one in launched.values():
            one.process.join(_GRACE)
            one.process.kill()
