"""Logs of a run, on rank 0: JSON lines, TensorBoard, Weights & Biases, a plot at the end."""

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any

from parallel_ops.train.throughput import peak_share

if TYPE_CHECKING:
    from parallel_ops.train.config_sections import LoggingSettings
    from parallel_ops.train.results import Step
    from parallel_ops.train.run_state import RunState


class Metrics:
    """The log files of a trainer; ``outputs.check`` checks before that they can be written."""

    def __init__(self, trainer: "RunState") -> None:
        self.trainer = trainer
        self.settings: LoggingSettings = trainer.settings.logging
        self.records: list[dict[str, Any]] = []
        self._files = contextlib.ExitStack()
        self._jsonl: Any = None
        self._board: Any = None
        self._wandb: Any = None
        self._peak_share = peak_share(trainer)

    def __enter__(self) -> "Metrics":
        if self.trainer.rank == 0:
            if self.settings.jsonl is not None:
                self.records = _kept(self.settings.jsonl, self.trainer.global_step)
                self._jsonl = self._files.enter_context(_rewritten(self.settings.jsonl, self.records))
            if self.settings.tensorboard is not None:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self.settings.tensorboard), purge_step=self.trainer.global_step + 1)
                self._files.callback(self._board.close)
            if self.settings.wandb is not None:
                import wandb

                config = self.trainer.settings.model_dump(mode="json")
                self._wandb = wandb.init(project=self.settings.wandb, config=config)
                self._files.callback(self._wandb.finish)
        return self

    def add(self, step: "Step") -> None:
        """Logs a step."""
        if self.trainer.rank:
            return
        rate = step.tokens / step.seconds
        record = {
            "step": step.number,
            "loss": None if step.without_target else _finite(step.loss),
            "grad_norm": _finite(step.grad_norm),
            "tokens": step.tokens,
            "seconds": step.seconds,
            "lr": step.lr,
            "tokens_per_second_per_gpu": rate / self.trainer.world,
        }
        if self._peak_share:
            record["mfu"] = rate * self._peak_share
        if step.evaluation_loss is not None:
            record["evaluation_loss"] = _finite(step.evaluation_loss)
        record |= step.experts or {}
        self.records.append(record)
        if self._jsonl is not None:
            try:
                self._jsonl.write(json.dumps(record) + "\n")
                self._jsonl.flush()
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.settings.jsonl)) from None
        if self._board is not None:
            for name in ("loss", "grad_norm", "lr", "evaluation_loss"):
                if (value := getattr(step, name)) is not None:
                    self._board.add_scalar(name, value, step.number)
            for name, value in (step.experts or {}).items():
                self._board.add_scalar(name, value, step.number)
            self._board.add_scalar("tokens_per_second", rate, step.number)
            for name in ("tokens_per_second_per_gpu", "mfu"):
                if name in record:
                    self._board.add_scalar(name, record[name], step.number)
        if self._wandb is not None:
            values = {name: value for name, value in record.items() if name != "step" and value is not None}
            self._wandb.log(values, step=step.number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._files.close()
        except OSError:
            if error is None:  # closing a file that could not be written fails too
                raise
        if self.trainer.rank == 0 and self.settings.plot is not None and self.records:
            save_plot(self.records, self.settings.plot)


def _kept(path: Path, step: int) -> list[dict[str, Any]]:
    """The records in a file of the steps before a resume."""
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


def save_plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Saves a picture of loss and evaluation, throughput, gradient norm and learning rate over the steps."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 7.6), layout="constrained")
    (losses, speeds), (norms, rates) = figure.subplots(2, 2)
    steps = [record["step"] for record in records]
    losses.plot(steps, _values(records, "loss"), color="#1d3557", linewidth=1.8)
    if evaluated := [r for r in records if r.get("evaluation_loss") is not None]:
        points = [r["evaluation_loss"] for r in evaluated]
        losses.plot([r["step"] for r in evaluated], points, "o-", color="#e76f51", markersize=4, label="evaluation")
        losses.lines[0].set_label("training")
        losses.legend(frameon=False)
    losses.set(title="Loss", ylabel="cross entropy, nats per token")
    found = [r["tokens"] / r["seconds"] for r in records]
    middle = median(found)
    speeds.plot(steps, found, "o", color="#2a9d8f", markersize=3, alpha=0.7, markeredgewidth=0)
    speeds.axhline(middle, color="#2a9d8f", linewidth=1.6)
    speeds.set(title=f"Throughput, median {middle:,.0f} tokens/s", ylabel="tokens/s")
    speeds.set_ylim(0)
    norms.plot(steps, _values(records, "grad_norm"), color="#6d597a", linewidth=1.4)
    norms.set(title="Gradient norm, before clipping", xlabel="step")
    norms.set_ylim(0)
    rates.plot(steps, _values(records, "lr"), color="#b56576", linewidth=1.8)
    rates.set(title="Learning rate", xlabel="step")
    rates.set_ylim(0)
    for axes in (losses, speeds, norms, rates):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=150)


def _values(records: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [math.nan if record.get(name) is None else record[name] for record in records]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
