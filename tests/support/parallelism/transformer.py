"""What each rank does in the tests of the transformer."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from parallel_ops.models import Llama3Scaling, Transformer, TransformerConfig, YarnScaling, config_from_pretrained
from parallel_ops.models.huggingface import streaming, tensor_files
from support.parallelism.layers import local, whole

GPT2 = TransformerConfig(
    vocab_size=61, seq_length=24, num_layers=2, hidden_size=48, num_heads=4, ffn_hidden_size=80, init_std=0.3
)
LLAMA = dataclasses.replace(
    GPT2,
    num_kv_heads=2,
    head_dim=16,
    activation="swiglu",
    norm="rms_norm",
    bias=False,
    positions="rotary",
    rotary_scaling=Llama3Scaling(factor=4.0, low_frequency=1.0, high_frequency=4.0, original_length=12),
    tied_embeddings=False,
)
CONFIGS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, rotary_scaling=None, window=(None, 5), qkv_bias=True),
    "sinks": dataclasses.replace(
        LLAMA,
        attention_bias=True,
        attention_sinks=True,
        window=(5, None),
        rotary_scaling=YarnScaling(factor=4.0, original_length=12, beta_fast=3.0, beta_slow=0.5),
    ),
    "dropout": dataclasses.replace(GPT2, dropout=0.3),
}


def mesh() -> DeviceMesh | None:
    """All ranks as tensor-parallel ones; ``None`` where there is no process group."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)) if dist.is_initialized() else None


def sample(length: int = 24, batch: int = 3, vocab: int = 61) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab, (2, length, batch), generator=generator).unbind()


def state(model: Transformer) -> dict[str, Tensor]:
    return {name: whole(t).detach().clone() for name, t in model.state_dict().items()}


def gradients(model: Transformer) -> dict[str, Tensor]:
    return {name: whole(p.grad).detach().clone() for name, p in model.named_parameters()}


def step(rank: int, name: str, sequence_parallel: bool) -> dict[str, Any]:
    """Loss, logits, whole weights and gradients in fp64 of the model that seed 0 draws."""
    torch.manual_seed(0)
    model = Transformer(CONFIGS[name], tp_mesh=mesh(), sequence_parallel=sequence_parallel, dtype=torch.float64)
    drawn = state(model)
    tokens, targets = sample()
    torch.manual_seed(2)
    loss = model(tokens, targets)
    loss.backward()
    model.eval()
    with torch.no_grad():
        logits = model(tokens)
    return {"loss": loss.detach(), "logits": logits, "weights": drawn, "gradients": gradients(model)}


def drawn_part(rank: int, name: str) -> dict[str, Tensor]:
    """The weights of a pipeline stage that has the last layer, the norm and the head alone, made without memory."""
    torch.manual_seed(0)
    model = Transformer(CONFIGS[name], tp_mesh=mesh(), device="meta", dtype=torch.float64)
    model.tokens = model.positions = None
    del model.layers["0"]
    model.to_empty(device="cpu")
    model.reset_parameters()
    return state(model)


def sharded_step(rank: int, name: str, tp: int, folder: str | None) -> dict[str, Any]:
    """As ``step``, in fp32 under FSDP2 of 4 / tp ranks; drawn, or loaded from a folder and saved into it."""
    root = init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("dp", "tp"))
    config = CONFIGS[name] if folder is None else config_from_pretrained(folder)
    model = Transformer(config, tp_mesh=root["tp"], sequence_parallel=True, device="meta")
    for layer in model.layers.values():
        fully_shard(layer, mesh=root["dp"])
    fully_shard(model, mesh=root["dp"])
    model.to_empty(device="cpu")
    if folder is None:
        torch.manual_seed(0)
        model.reset_parameters()
    else:
        model.load_pretrained(folder)
    drawn = state(model)
    tokens, targets = sample(batch=4)
    tokens, targets = (t.chunk(4 // tp, dim=1)[root["dp"].get_local_rank()] for t in (tokens, targets))
    loss = model(tokens, targets)
    loss.backward()
    grads, mean = gradients(model), loss.detach() / root.size()
    dist.all_reduce(mean)
    if folder is not None:
        model.save_pretrained(Path(folder, f"again{tp}"), file_bytes=20_000)
    return {"loss": mean, "weights": drawn, "gradients": grads}


def odd_length(rank: int) -> Tensor:
    return Transformer(GPT2, tp_mesh=mesh(), sequence_parallel=True)(torch.zeros(7, 1, dtype=torch.long))


def loaded(rank: int, folder: str, tokens: Tensor, save: str | None) -> dict[str, Any]:
    """Logits of a folder's model, with and without sequence parallelism, and how much of the files was read."""
    read = 0
    original = tensor_files.Files.read

    def counted(self: Any, *args: Any) -> Tensor:
        nonlocal read
        part = original(self, *args)
        read += part.numel()
        return part

    with mock.patch.object(tensor_files.Files, "read", counted):
        model = Transformer.from_pretrained(folder, tp_mesh=mesh()).eval()
    held = sum(local(p).numel() for p in model.state_dict().values())
    with torch.no_grad():
        logits = [model(tokens)]
        if dist.is_initialized():
            logits.append(Transformer.from_pretrained(folder, tp_mesh=mesh(), sequence_parallel=True).eval()(tokens))
    if save is not None:
        model.save_pretrained(save)
    return {"logits": logits, "read": read, "held": held}


def refused(rank: int, folders: list[str], good: str) -> list[tuple[str, str, bool]]:
    """For each folder the error of loading it, and whether the model that should take it is as it was."""
    model = Transformer.from_pretrained(good, tp_mesh=mesh())
    before = [p.detach().clone() for p in model.parameters()]
    results = []
    for folder in folders:
        try:
            model.load_pretrained(folder)
        except (ValueError, OSError) as error:
            same = all(torch.equal(local(a), local(b)) for a, b in zip(before, model.parameters(), strict=True))
            results.append((type(error).__name__, str(error), same))
        else:
            results.append(("nothing", "", False))
    return results


def saved_over(rank: int, good: str, place: str) -> None:
    Transformer.from_pretrained(good, tp_mesh=mesh()).save_pretrained(place)


def saved_without_memory(rank: int, good: str, place: str) -> None:
    """Rank 0 has no memory for one of the tensors that it writes, in the middle of the file."""
    model, real, left = Transformer.from_pretrained(good, tp_mesh=mesh()), streaming.joined, iter(range(5))

    def joined(pieces: streaming.Pieces, dtype: torch.dtype) -> Tensor:
        if next(left, None) is None:
            raise MemoryError("no memory for a tensor")
        return real(pieces, dtype)

    with mock.patch.object(streaming, "joined", joined):
        model.save_pretrained(place)
