"""How fast a run is relative to its GPUs."""

from typing import TYPE_CHECKING

import torch

from parallel_ops.models import Transformer
from parallel_ops.planner import presets

if TYPE_CHECKING:
    from parallel_ops.train.run_state import RunState


def peak_share(trainer: "RunState") -> float:
    """The fraction of all ranks' peak (MFU) for one token a second; 0 if unknown."""
    from parallel_ops.train.planner_bridge import gpu_here, model_of

    name = torch.cuda.get_device_name(trainer.device).lower() if trainer.device.type == "cuda" else ""
    gpu = gpu_here() if name and isinstance(trainer.model, Transformer) else None
    # The presets have the figures of the fastest variant.
    if gpu is None or "pcie" in name or "nvl" in name:
        return 0.0
    peak = presets.gpu(gpu).peak(trainer.settings.precision.dtype) * trainer.world
    return 3 * model_of(trainer.settings).forward_flops / peak
