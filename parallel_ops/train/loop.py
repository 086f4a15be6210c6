"""Trains one model, one step at a time."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_ops.layers import clip_grad_norm
from parallel_ops.models import FUSED, GPT, PLAIN, Ops, ParallelGPT
from parallel_ops.train.config import DTYPES, TrainConfig
from parallel_ops.train.data import batches, load_text

OPS = {"plain": PLAIN, "fused": FUSED}


@dataclass(frozen=True)
class Step:
    """What one step gave: the loss before its update, in nats per byte, and the seconds it took."""

    loss: float
    seconds: float


class Trainer:
    """A GPT, its optimiser and its batches.

    Args:
        config: the run.
        ops: what the model calls. Nothing else depends on it: weights and batches are those of the seed.
        tokens: the text; ``None`` to load ``config.text``.
        group: the tensor-parallel processes, this one among them, that train one model, with the fused ops; ``None``
            for a model on this process alone.

    Attributes:
        generator: what the batches are drawn from. done: how many steps were taken.
    """

    def __init__(
        self, config: TrainConfig, ops: Ops = FUSED, tokens: Tensor | None = None, group: ProcessGroup | None = None
    ) -> None:
        self.config, self.group = config, group
        self.device = torch.device(config.device)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.batches: Iterator[tuple[Tensor, Tensor]] = batches(
            load_text(config.text) if tokens is None else tokens,
            seq_length=config.model.seq_length,
            batch=config.batch,
            seed=self.generator,
        )
        torch.manual_seed(config.seed)
        model: GPT | ParallelGPT
        if group is None:
            model = GPT(config.model, ops)
        else:
            model = ParallelGPT(config.model, group=group, sequence_parallel=config.sequence_parallel)
        self.model = model.to(self.device)
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
            loss = self.model(tokens, targets)
        loss.backward()
        if self.group is None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        else:
            clip_grad_norm(self.model, self.config.clip, self.group)
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
