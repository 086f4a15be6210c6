"""Times of the passes of a pipeline schedule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

PerStage = float | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of the passes of one micro-batch, in any unit.

    Each is one number for all stages, or a sequence with one number per stage. With v stages on a rank, each has 1/v of
    the rank's layers and time.

    Attributes:
        forward: F.
        input_grad: I, including recomputation of activations.
        weight_grad: W. B takes I + W.
        link: a message between neighbouring stages on different ranks; a sequence has ``stages - 1`` entries.
        pair: F and B of a DualPipe pair, as one number; ``None`` for F + I + W of their stages.
        input_grad_first: B computes I, sends the gradient and then computes W, so the stage before waits for I alone.
            In a pair W comes last too. If False, the gradient leaves at the end of B.

    Raises:
        ValueError: a time is negative or not finite.
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    link: PerStage = 0.0
    pair: float | None = None
    input_grad_first: bool = False

    def __post_init__(self) -> None:
        for name in ("forward", "input_grad", "weight_grad", "link", "pair"):
            value = getattr(self, name)
            for number in value if isinstance(value, Sequence) else (value,):
                if number is not None and not (math.isfinite(number) and number >= 0):
                    raise ValueError(f"Times: {name} must be finite and not negative, got {number}")

    def per_stage(self, name: str, count: int) -> list[float]:
        """The time ``name`` of each of ``count`` stages (or links)."""
        value = getattr(self, name)
        if not isinstance(value, Sequence):
            return [float(value)] * count
        if len(value) != count:
            raise ValueError(f"Times: {name} has {len(value)} entries; the schedule needs {count}, or one number")
        return [float(number) for number in value]
