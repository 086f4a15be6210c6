"""What each rank does in the tests of the tensor-parallel GPT."""

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from parallel_ops.layers import load_optimizer_state_dict, optimizer_state_dict
from parallel_ops.models import GPT, GPTConfig, ParallelGPT
from parallel_ops.train import TrainConfig, Trainer, checkpoint

CONFIG = GPTConfig(vocab_size=61, seq_length=24, layers=2, hidden=48, heads=4, ffn_hidden=80, init_std=0.3)
VARIANTS = {
    "gelu": CONFIG,
    "llama": dataclasses.replace(
        CONFIG, activation="swiglu", norm="rms_norm", positions="rotary", tied_embeddings=False
    ),
    "dropout": dataclasses.replace(CONFIG, dropout=0.3),
}


def sample(config: GPTConfig) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (2, config.seq_length, 3), generator=generator).unbind()


def _whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def step(rank: int, variant: str, sequence_parallel: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict, dict]:
    """(loss, logits, whole gradients, whole weights); on one process without a group."""
    config = VARIANTS[variant]
    torch.manual_seed(0)
    group = dist.group.WORLD if dist.is_initialized() else None
    model = ParallelGPT(config, group=group, sequence_parallel=sequence_parallel).to(dtype)
    weights = {name: _whole(t).clone() for name, t in model.state_dict().items()}
    tokens, targets = sample(config)
    torch.manual_seed(2)
    loss = model(tokens, targets)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)  # the state dict puts gradients together as it does weights
        grads = {name: _whole(t) for name, t in model.state_dict().items()}
    torch.manual_seed(0)
    model = ParallelGPT(config, group=group, sequence_parallel=sequence_parallel).to(dtype).eval()
    return loss.detach(), model(tokens).detach(), grads, weights


def reference(variant: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict, dict]:
    """The same of the GPT of one process."""
    config = VARIANTS[variant]
    torch.manual_seed(0)
    model = GPT(config).to(dtype)
    tokens, targets = sample(config)
    loss = model(tokens, targets)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return loss.detach(), model(tokens).detach(), grads, model.state_dict()


def full_state(rank: int, variant: str) -> dict[str, Tensor]:
    """The model of ``step``, put together by ``get_model_state_dict``."""
    torch.manual_seed(0)
    model = ParallelGPT(VARIANTS[variant], group=dist.group.WORLD).double()
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def odd_length(rank: int) -> Tensor:
    model = ParallelGPT(CONFIG, group=dist.group.WORLD, sequence_parallel=True)
    return model(torch.zeros(7, 1, dtype=torch.long))


def train_losses(rank: int, config: TrainConfig) -> list[float]:
    trainer = Trainer(config, group=dist.group.WORLD)
    return [trainer.step().loss for _ in range(config.steps)]


def go_on(rank: int, variant: str, kind: type, steps: range, load: str | None, save: str | None, at: int) -> tuple:
    """(losses, whole weights and Adam's moments at the end) of a model that is trained from a checkpoint or its seed.

    Args:
        kind: ``GPT``, or ``ParallelGPT`` over all ranks.
        save: where to save, before step ``at``.
    """
    config = VARIANTS[variant]
    torch.manual_seed(1 if load else 0)
    group = dist.group.WORLD if dist.is_initialized() else None
    model = (GPT(config) if kind is GPT else ParallelGPT(config, group=group, sequence_parallel=True)).double()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)

    def state() -> dict:
        return {"model": model.state_dict(), "optimizer": optimizer_state_dict(model, optimizer)}

    if load:
        loaded = state()
        dcp.load(loaded, checkpoint_id=load, no_dist=group is None)
        model.load_state_dict(loaded["model"])
        load_optimizer_state_dict(model, optimizer, loaded["optimizer"])
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(config.vocab_size, (steps.stop, 2, config.seq_length, 3), generator=generator)
    losses = []
    for number in steps:
        if save and number == at:
            dcp.save(state(), checkpoint_id=save, no_dist=group is None)
        loss = model(*batches[number])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    end = {f"weight {name}": _whole(t).clone() for name, t in model.state_dict().items()}
    for name, own in optimizer_state_dict(model, optimizer)["state"].items():
        end |= {f"{key} {name}": _whole(t).clone() for key, t in own.items()}
    return losses, end


def train_on(rank: int, config: TrainConfig, load: Path | None, save: Path | None, at: int = 0) -> list[float]:
    """The losses of a trainer from a checkpoint or its seed; on the way, after step ``at``, another is saved."""
    trainer = Trainer(config, group=dist.group.WORLD if dist.is_initialized() else None)
    if load is not None:
        checkpoint.load(trainer, load)
    losses = []
    while trainer.done < config.steps:
        losses.append(trainer.step().loss)
        if save is not None and trainer.done == at:
            checkpoint.save(trainer, save)
    return losses
