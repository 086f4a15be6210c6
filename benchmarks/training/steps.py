"""Training steps that ``bench_step`` compares: of ``Trainer``, and as a PyTorch user writes them."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.demo.baseline import PlainTransformer
from parallel_ops import ParallelMesh
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.train import Trainer
from parallel_ops.train.config import Settings
from parallel_ops.train.data.loader import Loader
from parallel_ops.train.data.packing import Samples
from parallel_ops.train.data.tokens import TokenStream
from parallel_ops.train.parallelize_model import PRECISIONS
from parallel_ops.train.step.optimizer import optimizer_of

_SEED, _RATE = 0, 1e-3
SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 512, "num_heads": 8, "seq_length": 512, "vocab_size": 8_192}
TINY: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "seq_length": 16, "vocab_size": 64}


@dataclass(frozen=True)
class Shape:
    """Settings that all arms have in common."""

    data: Path
    ranks: int
    dtype: str
    micro_batch: int
    accumulation: int
    cpu_time: bool
    keep_memory: bool

    @property
    def plan(self) -> dict[str, int]:
        global_batch = self.ranks * self.micro_batch * self.accumulation
        return {"dp": self.ranks, "global_batch": global_batch, "micro_batch": self.micro_batch}


def write_tokens(folder: Path) -> Path:
    """Tokens with something to learn in them: the same pairs come again and again."""
    generator = np.random.default_rng(0)
    pairs = generator.integers(0, TINY["vocab_size"], (64, 2))
    pairs[generator.integers(0, 64, 400_000)].astype("uint16").tofile(folder / "tokens.bin")
    return folder / "tokens.bin"


def settings_of(data: Path, sizes: dict[str, Any], **parallel: Any) -> Settings:
    dtype = parallel.pop("dtype", "fp32")
    return Settings.model_validate(
        {
            "run": {"steps": 10_000, "seed": _SEED},
            "model": sizes,
            "data": {"paths": [str(data)]},
            "optimizer": {"lr": _RATE, "schedule": "constant"},
            "parallel": parallel,
            "precision": {"dtype": dtype},
        }
    )


class TrainerStep:
    """A step of ``Trainer``."""

    def __init__(self, settings: Settings, mesh: ParallelMesh | None) -> None:
        self.trainer = Trainer(settings, mesh)
        self.model, self.optimizer = self.trainer.model, self.trainer.optimizer
        self.losses: list[float] = []

    def __call__(self) -> None:
        self.losses.append(self.trainer.step().loss)


class PlainStep:
    """A step as a PyTorch user writes it, of a model that returns its loss."""

    def __init__(self, settings: Settings, model: nn.Module, device: torch.device, *, autocast: bool = False) -> None:
        plan = settings.plan
        self.model, self.device, self.autocast = model, device, autocast
        self.optimizer = optimizer_of(model, settings.optimizer)
        self.loader, self.samples_seen, self.global_batch = _loader(settings), 0, plan.global_batch
        self.losses: list[float] = []

    def __call__(self) -> None:
        batches = self.loader.step(self.samples_seen)
        self.samples_seen += self.global_batch
        for group in self.optimizer.param_groups:
            group["lr"] = _RATE
        total = torch.zeros((), device=self.device)
        for number, on_host in enumerate(batches):
            last = number == len(batches) - 1
            quiet: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if isinstance(self.model, nn.parallel.DistributedDataParallel) and not last:
                quiet = self.model.no_sync()
            batch = on_host.to(self.device)
            with quiet:
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                    loss = self.model(batch.tokens, batch.targets) / len(batches)
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        self.losses.append(total.item() / dist.get_world_size())


def _loader(settings: Settings) -> Loader:
    plan = settings.plan
    samples = Samples(TokenStream(settings.data.paths), seq_length=settings.seq_length, seed=_SEED)
    return Loader(
        samples, global_batch=plan.global_batch, micro_batch=plan.micro_batch, replicas=dist.get_world_size(),
        replica=dist.get_rank(),
    )  # fmt: skip


ARMS = ("fsdp2", "fsdp2, compiled", "ddp", "trainer, zero 0", "trainer, zero 2", "trainer, zero 3")


def arm(name: str, shape: Shape, device: torch.device) -> PlainStep | TrainerStep:
    mesh = ParallelMesh(dp_shard=shape.ranks)
    if name.startswith("trainer"):
        return TrainerStep(settings_of(shape.data, SIZES, **shape.plan, zero=int(name[-1]), dtype=shape.dtype), mesh)
    settings = settings_of(shape.data, SIZES, **shape.plan, dtype=shape.dtype)
    torch.manual_seed(_SEED)
    weights = Transformer(TransformerConfig(**SIZES)).state_dict()
    model = PlainTransformer(TransformerConfig(**SIZES))
    model.load_state_dict(weights)
    model.to(device)
    if name == "ddp":
        return PlainStep(settings, nn.parallel.DistributedDataParallel(model), device, autocast=shape.dtype != "fp32")
    low = PRECISIONS[shape.dtype]
    policy = MixedPrecisionPolicy() if shape.dtype == "fp32" else MixedPrecisionPolicy(low, torch.float32)
    for layer in model.layers:
        if name.endswith("compiled"):
            layer.compile()
        fully_shard(layer, mesh=mesh["fsdp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["fsdp"], mp_policy=policy)
    return PlainStep(settings, model, device)


def held_bytes(step: PlainStep | TrainerStep) -> int:
    """Bytes of this rank's parameters and optimizer state."""
    tensors: list[Any] = list(step.model.parameters())
    tensors += [value for state in step.optimizer.state.values() for value in state.values()]
    own = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in own)
