"""Logs of a run, on rank 0: JSON lines, TensorBoard, Weights & Biases, a plot at the end."""

import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from parallel_ops.train.report.outputs import optional
from parallel_ops.train.report.throughput import peak_share

if TYPE_CHECKING:
    from parallel_ops.train.report.settings import LoggingSettings
    from parallel_ops.train.results import Step
    from parallel_ops.train.run_state import RunState


class Metrics:
    """The log files of a trainer; ``outputs.check`` checks before that they can be written.

    Later problems of a log are one warning, and do not end the run. Lines that could not be written are written as soon
    as that is possible.
    """

    def __init__(self, trainer: "RunState") -> None:
        self.trainer = trainer
        self.settings: LoggingSettings = trainer.settings.logging
        self.records: list[dict[str, Any]] = []
        self._files = contextlib.ExitStack()
        self._jsonl: Any = None
        self._lines = ""
        self._board: Any = None
        self._wandb: Any = None
        self._warned: set[str] = set()
        self._peak_share = peak_share(trainer)

    def __enter__(self) -> "Metrics":
        if self.trainer.rank == 0:
            if (path := self.settings.jsonl) is not None:
                with optional(str(path), self._warned):
                    self.records = continued(path, self.trainer.global_step)
                    # Lines are written at once, so nothing is left that closing the file could fail to write.
                    self._jsonl = self._files.enter_context(path.open("ab", buffering=0))
            if self.settings.tensorboard is not None:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self.settings.tensorboard), purge_step=self.trainer.global_step + 1)
                self._files.callback(self._board.close)
            if self.settings.wandb is not None:
                import wandb

                config = self.trainer.settings.model_dump(mode="json")
                known = self.trainer.wandb_run
                again = {} if known is None else {"id": known, "resume": "allow"}
                self._wandb = wandb.init(project=self.settings.wandb, config=config, **again)
                self.trainer.wandb_run = getattr(self._wandb, "id", None)
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
        if self.settings.plot is not None:
            self.records.append(record)
        if self._jsonl is not None:
            self._lines += json.dumps(record) + "\n"
            with optional(str(self.settings.jsonl), self._warned):
                written = self._jsonl.write(self._lines.encode())
                self._lines = self._lines[written:]
        values = {name: value for name, value in record.items() if name != "step" and value is not None}
        if self._board is not None:
            with optional(f"logging.tensorboard {self.settings.tensorboard}", self._warned):
                for name, value in values.items():
                    self._board.add_scalar(name, value, step.number)
        if self._wandb is not None:
            with optional("logging.wandb", self._warned):
                self._wandb.log(values, step=step.number)

    def __exit__(self, *_: object) -> None:
        with optional("closing the logs", self._warned):
            self._files.close()
        if self.trainer.rank == 0 and self.settings.plot is not None and self.records:
            with optional(str(self.settings.plot), self._warned):
                save_plot(self.records, self.settings.plot)


# Values of a record that the plot needs.
_PLOTTED = ("loss", "grad_norm", "tokens", "seconds", "lr")
_START = b'{"step": '


def continued(path: Path, step: int) -> list[dict[str, Any]]:
    """Prepares the log of a run that has taken ``step`` steps, and returns the records of these.

    The log of an earlier run is renamed; with its own name, files of a run end with ``.1``, ``.2`` before the suffix.
    Records of later steps, which the run takes again, and a last one that was cut off, move to a file with
    ``.abandoned`` before the suffix. Lines that are no records stay as they are.
    """
    if not path.is_file() or not path.stat().st_size:
        return []
    if not step:
        number = 1
        while os.path.lexists(kept := path.with_name(f"{path.stem}.{number}{path.suffix}")):
            number += 1
        path.rename(kept)
        print(f"note: {path} was of an earlier run, and is {kept} now", file=sys.stderr, flush=True)
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    whole_lines = lines if lines[-1].endswith(b"\n") else [*lines[:-1], lines[-1] + b"\n"]
    records = [_record(line) for line in lines]
    if records[-1] is None and lines[-1] is not whole_lines[-1] and lines[-1].startswith(_START):
        records[-1] = {"step": math.inf}
    later = [line for line, record in zip(whole_lines, records, strict=True) if record and record["step"] > step]
    left = [line for line, record in zip(whole_lines, records, strict=True) if not record or record["step"] <= step]
    if left != lines:
        if later:
            with path.with_name(f"{path.stem}.abandoned{path.suffix}").open("ab") as file:
                file.writelines(later)
        whole = path.resolve()  # not the link, if it is one
        with tempfile.NamedTemporaryFile(dir=whole.parent, prefix=f".{whole.name}", delete=False) as rewritten:
            rewritten.writelines(left)
        shutil.copymode(whole, rewritten.name)
        os.replace(rewritten.name, whole)
    return [record for record in records if record and record["step"] <= step and _can_be_plotted(record)]


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a step in a line; ``None`` if there is something else."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict) and type(found.get("step")) is int:
            return found
    return None


def _can_be_plotted(record: dict[str, Any]) -> bool:
    values = [record.get(name) for name in _PLOTTED]
    return all(isinstance(value, int | float) for value in values[2:]) and bool(record["seconds"])


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
