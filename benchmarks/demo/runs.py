"""One model of the demo, trained one step at a time by ``Trainer``."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.demo.baseline import PlainTransformer
from benchmarks.demo.data import load_text
from benchmarks.demo.matmul_floor import Products
from parallel_ops.comm import ParallelMesh
from parallel_ops.models import Transformer
from parallel_ops.train.config import Settings
from parallel_ops.train.data.tokens import TokenFile, TokenStream
from parallel_ops.train.parallelize_model import PRECISIONS
from parallel_ops.train.progress import peak_memory
from parallel_ops.train.trainer import Trainer

# The models that train on one process: plain PyTorch and this package, each eager and compiled whole.
ALONE = ("plain", "compiled", "fused", "fused-compiled")
# Not a model: the matrix products of a step, which every model computes.
PRODUCTS = "products"
COMPILED = ("compiled", "fused-compiled")


def demo_trainer(
    settings: Settings,
    kind: str = "fused",
    tokens: Tensor | None = None,
    mesh: ParallelMesh | None = None,
    **options: Any,
) -> Trainer:
    """A trainer of one of the demo's models. All kinds have the same weights and samples.

    Args:
        kind: One of ``ALONE``.
        tokens: The text, uint8 ``[n]``; ``None`` loads ``settings.data.paths``.
        mesh: The processes that train one fused model; ``None`` for this process alone.
    """
    text = (load_text(settings.data.paths[0]) if tokens is None else tokens).numpy()
    stream = TokenStream.of([TokenFile(Path(), text, np.array([len(text)]))])
    model: nn.Module | None = None
    if kind in ("plain", "compiled"):
        torch.manual_seed(settings.run.seed)
        weights = Transformer(settings.config).state_dict()
        model = PlainTransformer(settings.config)
        model.load_state_dict(weights)
    trainer = Trainer(settings, mesh, model=model, stream=stream, **options)
    if kind in COMPILED:
        trainer.model.compile()
    return trainer


def compile_now(trainer: Trainer) -> None:
    """Compiles what a step would compile, by a forward and backward that change nothing; for processes that start
    together, and so compile at the same time instead of one after another."""
    batch = trainer.loader.step(trainer.samples_seen)[0].to(trainer.device)
    dtype = PRECISIONS[trainer.settings.plan.dtype]
    with torch.autocast(trainer.device.type, dtype=dtype, enabled=dtype is not torch.float32):
        loss: Tensor = trainer.model(batch.tokens, batch.targets)
    loss.backward()
    trainer.model.zero_grad()


def answer(run: Trainer | Products, request: str) -> Any:
    """Takes a step, or reads the peak memory.

    Returns:
        For ``"step"`` the loss before the update, in nats per byte, and the seconds of the step. For ``"peak_memory"``
        bytes, or ``None`` where it is not known.
    """
    if isinstance(run, Products):
        return (math.nan, run.seconds()) if request == "step" else None
    if request == "peak_memory":
        return peak_memory(run.device)
    step = run.step()
    return step.loss, step.seconds
