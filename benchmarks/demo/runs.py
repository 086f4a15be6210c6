"""Trains one model of the demo, one step at a time, by ``Trainer``."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.demo.baseline import PlainTransformer
from benchmarks.demo.config import DTYPES, TrainConfig
from benchmarks.demo.data import load_text
from benchmarks.demo.matmul_floor import Products
from parallel_ops.comm import ParallelMesh
from parallel_ops.models import Transformer
from parallel_ops.train.data.tokens import TokenFile, TokenStream
from parallel_ops.train.progress import peak_memory
from parallel_ops.train.trainer import Trainer

# The models that train on one process: plain PyTorch and this package, each as it is and compiled whole.
ALONE = ("plain", "compiled", "fused", "fused-compiled")
# Not a model: the matrix products of a step, of which every model has as many.
PRODUCTS = "products"


@dataclass(frozen=True)
class Step:
    """What one step gave: the loss before its update, in nats per byte, and the seconds it took."""

    loss: float
    seconds: float


class DemoTrainer:
    """A ``Trainer`` of one of the demo's models, which has the weights and samples of all of them.

    Args:
        config: the run.
        kind: of ``ALONE``.
        tokens: the text; ``None`` to load ``config.text``.
        mesh: the processes, this one among them, that train one model, with the fused ops; ``None`` for a model on
            this process alone.

    Attributes:
        trainer: it.
    """

    def __init__(
        self, config: TrainConfig, kind: str = "fused", tokens: Tensor | None = None, mesh: ParallelMesh | None = None
    ) -> None:
        text = (load_text(config.text) if tokens is None else tokens).numpy()
        stream = TokenStream.of([TokenFile(Path(), text, np.array([len(text)]))])
        model: nn.Module | None = None
        if kind in ("plain", "compiled"):
            torch.manual_seed(config.seed)
            weights = Transformer(config.model).state_dict()
            model = PlainTransformer(config.model)
            model.load_state_dict(weights)
        self.trainer = Trainer(config.settings(alone=mesh is None), mesh, model=model, stream=stream)
        if kind in ("compiled", "fused-compiled"):
            self.trainer.model.compile()

    def step(self) -> Step:
        """Takes one optimiser step."""
        step = self.trainer.step()
        return Step(step.loss, step.seconds)

    def peak_memory(self) -> int | None:
        """See ``progress.peak_memory``."""
        return peak_memory(self.trainer.device)


class ProductsAlone:
    """The matrix products of a step in the place of a trainer: its steps have no loss."""

    def __init__(self, config: TrainConfig) -> None:
        self._device = torch.device(config.device)
        self._products = Products(config.model, config.batch, DTYPES[config.dtype], self._device)

    def step(self) -> Step:
        """Makes them once."""
        start = time.perf_counter()
        self._products.run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return Step(math.nan, time.perf_counter() - start)

    def peak_memory(self) -> None:
        """Nobody asks."""
