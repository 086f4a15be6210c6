"""Liger's patches beside ours, where they can run: their kernels are Triton's, which need a GPU."""

import importlib.util
import inspect
from typing import Any

import torch

from benchmarks.training.patches import Patch


def unavailable(device: torch.device, module: str) -> str | None:
    """Why Liger's ``module`` is not measured; ``None`` where it is."""
    if device.type != "cuda":
        return "liger is not measured: its kernels are Triton's, which run on a GPU, and there is none"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger is not measured: it is not installed (pip install --no-deps liger-kernel)"
    if importlib.util.find_spec(module) is None:
        return f"liger is not measured: this version of it has no {module}"
    return None


def knows(model: Any) -> bool:
    """Whether it has kernels for this family of Transformers."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return model.config.model_type in MODEL_TYPE_TO_APPLY_LIGER_FN


def patch_model(model: Any) -> Patch:
    """Liger's default kernels in a model of Transformers; in force in the model's own modules, and within ``with`` in
    the names of Transformers that it rebinds for every model."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    return Patch("transformers", lambda: _apply_liger_kernel_to_instance(model))


def patch_megatron() -> Patch:
    """All of Liger's kernels in Megatron-core, for models that are built and run within ``with``."""
    from liger_kernel.megatron import apply_liger_kernel_to_megatron as apply

    # Some are off by default; versions differ in which there are.
    kernels = {name: True for name, p in inspect.signature(apply).parameters.items() if isinstance(p.default, bool)}
    kernels.pop("force", None)
    return Patch("megatron.core", lambda: apply(**kernels))
