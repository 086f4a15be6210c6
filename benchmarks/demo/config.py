"""What a training run is: the model, the text, the schedule, the device."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from parallel_ops.models import TransformerConfig

if TYPE_CHECKING:
    from parallel_ops.train.config import Settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run; the same configuration gives the same weights and batches every time.

    Attributes:
        model: its shape; ``vocab_size`` is at least 256, since tokens are bytes.
        text: a file, or a folder whose files are read in sorted order; ``None`` for Python's standard library.
        steps, batch: optimiser steps, and sequences of ``model.seq_length`` tokens in each.
        lr: peak learning rate of AdamW, reached after ``warmup`` of the steps; a cosine then takes it to a tenth.
        clip: largest norm of all gradients together.
        seed: of weights, batches and dropout.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ...
        dtype: ``"float32"``, or ``"bfloat16"`` for autocast over float32 weights.
        dp, tp, cp: processes of the parallel run, ``dp * tp * cp``: ``dp`` share each batch, ``tp`` each weight, ``cp``
            each sequence; 1, 1 and 1 for no such run.
        zero: ZeRO stage of the data-parallel ones.
        sequence_parallel: those that share a weight share the tokens between the layers' products too.

    Raises:
        ValueError: naming the field that is wrong.
    """

    model: TransformerConfig
    text: Path | None = None
    steps: int = 100
    batch: int = 8
    lr: float = 1e-3
    warmup: float = 0.1
    clip: float = 1.0
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    dp: int = 1
    tp: int = 1
    cp: int = 1
    zero: int = 0
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.model.vocab_size < 256:
            raise ValueError(f"TrainConfig: vocab_size must be at least 256 (bytes), got {self.model.vocab_size}")
        for name in ("steps", "batch", "dp", "tp", "cp"):
            if getattr(self, name) < 1:
                raise ValueError(f"TrainConfig: {name} must be at least 1, got {getattr(self, name)}")
        for name in ("lr", "clip"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"TrainConfig: {name} must be a positive number, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"TrainConfig: seed must be between 0 and 2^63 - 1, got {self.seed}")
        if self.dtype not in DTYPES:
            raise ValueError(f"TrainConfig: dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

        if self.batch % self.dp:
            raise ValueError(f"TrainConfig: batch must be a multiple of dp={self.dp}, got {self.batch}")
        shared = {"num_heads": self.model.num_heads, "ffn_hidden_size": self.model.resolved_ffn_hidden_size}
        for name, value in shared.items():
            if value % self.tp:
                raise ValueError(f"TrainConfig: {name} must be a multiple of tp={self.tp}, got {value}")
        if self.sequence_parallel and self.model.seq_length % (self.tp * self.cp):
            sizes = f"tp={self.tp}" + (f" * cp={self.cp}" if self.cp > 1 else "")
            raise ValueError(f"TrainConfig: seq_length must be a multiple of {sizes}, got {self.model.seq_length}")

    @property
    def ranks(self) -> int:
        """Processes of the parallel run."""
        return self.dp * self.tp * self.cp

    @property
    def parallel(self) -> str:
        """The name of the parallel run."""
        sizes = (("dp", self.dp, 1), ("tp", self.tp, 1), ("cp", self.cp, 1), ("zero", self.zero, 0))
        return "-".join(f"{name}{size}" for name, size, least in sizes if size > least)

    def settings(self, *, alone: bool) -> "Settings":
        """Of the parallel run, or of one on one process."""
        from parallel_ops.train.config import Settings

        batch: dict[str, Any] = {"global_batch": self.batch, "micro_batch": self.batch}
        if not alone:
            batch |= {"micro_batch": self.batch // self.dp, "dp": self.dp, "tp": self.tp, "cp": self.cp}
            batch |= {"zero": self.zero, "sequence_parallel": self.sequence_parallel and self.tp > 1}
        return Settings.model_validate(
            {
                "run": {"steps": self.steps, "seed": self.seed, "device": torch.device(self.device).type},
                "model": dataclasses.asdict(self.model),
                "data": {"paths": ["text"]},
                "optimizer": {"lr": self.lr, "warmup": max(1, round(self.warmup * self.steps)), "clip": self.clip},
                "parallel": batch,
                "precision": {"dtype": {"float32": "fp32", "bfloat16": "bf16"}[self.dtype]},
            }
        )
