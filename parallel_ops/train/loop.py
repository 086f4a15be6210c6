"""Trains one model, one step at a time."""

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_ops.comm import ParallelMesh
from parallel_ops.models import Transformer
from parallel_ops.train.config import DTYPES, TrainConfig
from parallel_ops.train.data import batches, load_text
from parallel_ops.train.parallelize import Spread, parallelize
from parallel_ops.train.plain import PlainTransformer
from parallel_ops.train.products import Products

# The models that train on one process: plain PyTorch and this package, each as it is and compiled whole.
ALONE = ("plain", "compiled", "fused", "fused-compiled")
# Not a model: the matrix products of a step, of which every model has as many.
PRODUCTS = "products"


@dataclass(frozen=True)
class Step:
    """What one step gave: the loss before its update, in nats per byte, and the seconds it took."""

    loss: float
    seconds: float


class Trainer:
    """A transformer, its optimizer and its batches.

    Args:
        config: the run.
        kind: of ``ALONE``. Nothing but the model's code depends on it: weights and batches are those of the seed.
        tokens: the text; ``None`` to load ``config.text``.
        mesh: the processes, this one among them, that train one model, with the fused ops; ``None`` for a model on
            this process alone.

    Attributes:
        generator: what the batches are drawn from. done: how many steps were taken.
    """

    def __init__(
        self, config: TrainConfig, kind: str = "fused", tokens: Tensor | None = None, mesh: ParallelMesh | None = None
    ) -> None:
        self.config = config
        self.group: ProcessGroup | None = None if mesh is None else dist.group.WORLD
        self.device = torch.device(config.device)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.batches: Iterator[tuple[Tensor, Tensor]] = batches(
            load_text(config.text) if tokens is None else tokens,
            seq_length=config.model.seq_length,
            batch=config.batch,
            seed=self.generator,
        )
        torch.manual_seed(config.seed)
        self.model: nn.Module = Transformer(config.model, device="meta")
        if mesh is not None:
            self.model = parallelize(self.model, mesh, Spread(sequence_parallel=config.sequence_parallel))
        self.model.to_empty(device=self.device)
        self.model.reset_parameters()  # type: ignore[operator]
        if kind in ("plain", "compiled"):
            state = self.model.state_dict()
            self.model = PlainTransformer(config.model).to(self.device)
            self.model.load_state_dict(state)
        self.call = torch.compile(self.model) if kind in ("compiled", "fused-compiled") else self.model
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
        self.done = 0

    def step(self) -> Step:
        """Draws a batch and takes one optimiser step."""
        self._synchronize()
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate(self.done)
        tokens, targets = (t.to(self.device) for t in next(self.batches))
        dtype = DTYPES[self.config.dtype]
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not torch.float32):
            loss = self.call(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        self._synchronize()
        seconds = time.perf_counter() - start
        return Step(loss.item(), seconds)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory(self) -> int | None:
        """The most memory held so far, in bytes: of tensors on a GPU, of the whole process on a CPU.

        ``None`` where the operating system does not say.
        """
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _peak_resident()


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


def _peak_resident() -> int | None:
    # On Linux not getrusage's ru_maxrss, which a child process inherits from its parent.
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None
