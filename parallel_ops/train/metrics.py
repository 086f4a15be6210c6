"""What a person sees of a run: a line now and then, JSONL, TensorBoard, a picture at the end. Rank 0 writes them."""

import contextlib
import importlib.util
import json
import math
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from parallel_ops.models import Transformer
from parallel_ops.planner import presets

if TYPE_CHECKING:
    from parallel_ops.train.config_sections import LoggingSettings
    from parallel_ops.train.results import Step
    from parallel_ops.train.trainer import Trainer

PICTURE_FORMATS = (".png", ".pdf", ".svg")
# Steps whose median time says how long the rest will take.
_RECENT = 50


class Metrics:
    """Of a trainer, from where it is to its end.

    Raises, when it is entered:
        ImportError: TensorBoard or matplotlib is not installed, and wanted. ValueError: a picture of another format.
        OSError: a file cannot be written.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.settings: LoggingSettings = trainer.settings.logging
        self.records: list[dict[str, Any]] = []
        self._seconds: list[float] = []
        self._since: tuple[int, float] = (trainer.done, time.perf_counter())
        self._files = contextlib.ExitStack()
        self._jsonl: Any = None
        self._board: Any = None
        self._flops = _flops(trainer)

    def __enter__(self) -> "Metrics":
        check(self.settings)
        if self.trainer.rank == 0:
            if self.settings.jsonl is not None:
                self.records = _kept(self.settings.jsonl, self.trainer.done)
                self._jsonl = self._files.enter_context(_rewritten(self.settings.jsonl, self.records))
            if self.settings.tensorboard is not None:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self.settings.tensorboard), purge_step=self.trainer.done + 1)
                self._files.callback(self._board.close)
        self._since = self.trainer.done, time.perf_counter()
        return self

    def add(self, step: "Step") -> None:
        """Takes note of a step."""
        if self.trainer.rank:
            return
        record = {
            "step": step.number,
            "loss": _finite(step.loss),
            "grad_norm": _finite(step.grad_norm),
            "tokens": step.tokens,
            "seconds": step.seconds,
            "lr": step.lr,
        }
        self.records.append(record)
        self._seconds = [*self._seconds[1 - _RECENT :], step.seconds]
        if self._jsonl is not None:
            try:
                self._jsonl.write(json.dumps(record) + "\n")
                self._jsonl.flush()
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.settings.jsonl)) from None
        if self._board is not None:
            for name in ("loss", "grad_norm", "lr"):
                self._board.add_scalar(name, getattr(step, name), step.number)
            self._board.add_scalar("tokens_per_second", step.tokens / step.seconds, step.number)
        if step.number % self.settings.every == 0 or step.number == self.trainer.settings.run.steps or step.skipped:
            self._say(step)

    def _say(self, step: "Step") -> None:
        first, start = self._since
        now = time.perf_counter()
        self._since = step.number, now
        rate = step.tokens * (step.number - first) / (now - start)
        steps = self.trainer.settings.run.steps
        left = timedelta(seconds=round((steps - step.number) * median(self._seconds)))
        parts = [f"step {step.number}/{steps}", f"loss {step.loss:.4f}", f"norm {step.grad_norm:.3g}"]
        parts += [f"lr {step.lr:.2e}", f"{rate:,.0f} tokens/s"]
        parts += [f"MFU {rate * self._flops:.1%}"] if self._flops else []
        memory = peak_memory(self.trainer.device)
        parts += [] if memory is None else [f"{memory / 2**30:.2f} GiB"]
        parts += [f"{left} left"]
        if step.skipped:
            end = self.trainer.taken
            parts += [f"not finite, skipped: samples {end - self.trainer.settings.plan.global_batch} to {end - 1}"]
        print("  ".join(parts), flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._files.close()
        except OSError:
            if error is None:  # a file that could not be written cannot be closed either
                raise
        if self.trainer.rank == 0 and self.settings.picture is not None and self.records:
            picture(self.records, self.settings.picture)


def check(settings: "LoggingSettings") -> None:
    """Whether what is wanted can be written; see ``Metrics``. Makes the folders of the files."""
    wanted = {"tensorboard": settings.tensorboard, "matplotlib": settings.picture}
    for package, file in wanted.items():
        if file is not None and importlib.util.find_spec(package) is None:
            raise ImportError(f"{file} needs {package}; run: pip install {package}")
    if settings.picture is not None and settings.picture.suffix.lower() not in PICTURE_FORMATS:
        raise ValueError(f"logging.picture must end in {', '.join(PICTURE_FORMATS)}, got {settings.picture}")
    for file in (settings.jsonl, settings.picture):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)


def _kept(path: Path, step: int) -> list[dict[str, Any]]:
    """What a file has of the steps before a run goes on."""
    if not step or not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the last line of a run that was killed
            records.append(json.loads(line))
    return [record for record in records if record["step"] <= step]


def _rewritten(path: Path, records: Sequence[dict[str, Any]]) -> Any:
    file = path.open("w")
    file.writelines(json.dumps(record) + "\n" for record in records)
    file.flush()
    return file


def picture(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Saves loss and throughput over the steps of a JSONL file, side by side."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    losses, rates = figure.subplots(1, 2)
    steps = [record["step"] for record in records]
    nan = math.nan
    losses.plot(steps, [nan if r["loss"] is None else r["loss"] for r in records], color="#1d3557", linewidth=1.8)
    losses.set(title="Loss", xlabel="step", ylabel="cross entropy, nats per token")
    speeds = [r["tokens"] / r["seconds"] for r in records]
    middle = median(speeds)
    rates.plot(steps, speeds, "o", color="#2a9d8f", markersize=3, alpha=0.7, markeredgewidth=0)
    rates.axhline(middle, color="#2a9d8f", linewidth=1.6)
    rates.set(title=f"Throughput, median {middle:,.0f} tokens/s", xlabel="step", ylabel="tokens/s")
    rates.set_ylim(0)
    for axes in (losses, rates):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=150)


def _flops(trainer: "Trainer") -> float:
    """The share of all ranks' peak that one token a second takes; 0 where that is not known."""
    from parallel_ops.train.planner_bridge import gpu_here, model_of

    name = torch.cuda.get_device_name(trainer.device).lower() if trainer.device.type == "cuda" else ""
    gpu = gpu_here() if name and isinstance(trainer.model, Transformer) else None
    # The figures are those of the fastest variant.
    if gpu is None or "pcie" in name or "nvl" in name:
        return 0.0
    peak = presets.gpu(gpu).peak(trainer.settings.precision.dtype) * trainer.world
    return 3 * model_of(trainer.settings).forward_flops / peak


def peak_memory(device: torch.device) -> int | None:
    """The most memory held so far, in bytes: of tensors on a GPU, of the whole process on a CPU.

    ``None`` where the operating system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # On Linux not getrusage's ru_maxrss, which a child process inherits from its parent.
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
