"""The options of low-rank adapters (LoRA)."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Lora:
    """Options of adapters.

    Attributes:
        rank: features between the two matrices of an adapter. alpha: an adapter is scaled by ``alpha / rank``.
        dropout: probability for elements of the input of adapters, in training.
        targets: patterns (``fnmatch``) of linears: of names here, such as ``"layers.*.attention.q"``, or of Hugging
            Face's names, whole or from a dot on, as peft's ``target_modules``, such as ``"q_proj"``.

    Raises:
        ValueError: an option out of range, no target.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("layers.*",)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"Lora: rank must be at least 1, got {self.rank}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"Lora: alpha must be positive, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"Lora: dropout must be from 0 to below 1, got {self.dropout}")
        if not self.targets:
            raise ValueError("Lora: targets must name linears, got none")
