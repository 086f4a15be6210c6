"""The section ``[logging]``."""

from typing import Annotated

from pydantic import Field

from parallel_ops.train.settings.section import Folder, Positive, Section


class LoggingSettings(Section):
    """Console and file logging.

    Attributes:
        interval: Steps between two progress lines.
        jsonl: File with one JSON object a step. tensorboard: Folder of TensorBoard events.
        wandb: Project of Weights & Biases, whose package must be installed.
        plot: File for a plot of loss, throughput, gradient norm and learning rate, written at the end.
        trace: Folder for a picture of the pipeline as it was measured in the second step, and a trace for Chrome.
        profile: Folder for a trace of some steps by torch's profiler, and on a GPU a snapshot of its memory.
    """

    interval: Positive = 1
    jsonl: Folder | None = None
    tensorboard: Folder | None = None
    plot: Folder | None = None
    trace: Folder | None = None
    wandb: Annotated[str, Field(min_length=1)] | None = None
    profile: Folder | None = None
