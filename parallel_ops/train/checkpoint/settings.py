"""The section ``[checkpoint]``."""

from parallel_ops.train.settings.section import Count, Folder, Positive, Section


class CheckpointSettings(Section):
    """Checkpoints.

    Attributes:
        dir: Folder of the checkpoints; ``"none"`` for no checkpoints.
        interval: Steps between two checkpoints; 0 saves the last step only.
        keep: Number of checkpoints kept.
        keep_best: Save after each evaluation with the lowest loss so far, and keep the best beside the last ``keep``.
        asynchronous: Continue training while a checkpoint is written.
    """

    dir: Folder | None = None
    interval: Count = 0
    keep: Positive = 2
    keep_best: bool = False
    asynchronous: bool = True
