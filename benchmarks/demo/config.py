"""Settings of the demo: one small model on the bytes of a text, on one process or several."""

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.demo.data import STANDARD_LIBRARY
from parallel_ops.models import TransformerConfig
from parallel_ops.planner.plan import Plan
from parallel_ops.train.config import Settings
from parallel_ops.train.config_file import settings_of
from parallel_ops.train.planner_bridge import changed


def demo_settings(
    model: TransformerConfig, text: Path | None = None, *, steps: int = 100, batch: int = 8, **sections: Any
) -> Settings:
    """A run on one process: AdamW with a tenth of the steps as warmup, then a cosine.

    Args:
        model: Its shape; ``vocab_size`` is at least 256, since tokens are bytes.
        text: A file, or a folder whose files are read in sorted order; ``None`` for Python's standard library.
        steps, batch: Optimizer steps, and sequences of ``model.seq_length`` tokens in each.
        sections: Further keys by section, ``optimizer={"lr": 1e-2}``; see ``Settings``.

    Raises:
        ValueError: A value is out of range; the message names its key.
    """
    if model.vocab_size < 256:
        raise ValueError(f"vocab_size must be at least 256, the number of bytes, got {model.vocab_size}")
    data: dict[str, Any] = {
        # Ranks wait for the turns of other runs, which may take any time.
        "run": {"steps": steps, "device": "cpu", "timeout": None},
        "model": dataclasses.asdict(model),
        "data": {"paths": [text or STANDARD_LIBRARY], "dtype": "uint8"},
        "optimizer": {"lr": 1e-3, "warmup": min(steps, max(1, round(0.1 * steps)))},
        "parallel": {"global_batch": batch, "micro_batch": batch},
        "precision": {"dtype": "fp32"},
    }
    return settings_of({name: {**own, **sections.get(name, {})} for name, own in data.items()}, "settings")


def in_parallel(settings: Settings, **plan: int | bool) -> Settings:
    """The same run by the fields ``plan`` of ``Plan``; a pipeline takes one sequence after another.

    Raises:
        ValueError: The sizes do not divide the batch or the model.
    """
    micro_batch = 1 if plan.get("pp", 1) > 1 else max(1, settings.plan.global_batch // max(1, plan.get("dp", 1)))
    return changed(settings, {"micro_batch": micro_batch, **plan})


def name_of(plan: Plan) -> str:
    """The name of a parallel run, such as ``dp2-tp2-zero3``."""
    sizes = (("pp", plan.pp, 1), ("dp", plan.dp, 1), ("tp", plan.tp, 1), ("cp", plan.cp, 1), ("zero", plan.zero, 0))
    return "-".join(f"{name}{size}" for name, size, least in sizes if size > least)
