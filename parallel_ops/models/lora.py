"""Low-rank adapters (LoRA) of a ``Transformer``: which linears have one, and their files.

    model = Transformer(config, tp_mesh=mesh, device="meta")
    add_adapters(model, Lora(rank=8, alpha=16.0, targets=("q_proj", "v_proj")))
    ...                                                 # parallelize, to_empty
    model.load_pretrained(folder)
    model.reset_parameters(only=LoraAdapter)

Source: Hu et al., arXiv:2106.09685. The adapters themselves are in ``layers.lora``.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel_ops.layers.experts import Experts
from parallel_ops.layers.linear_base import ParallelLinear
from parallel_ops.layers.lora import is_adapter, is_of_experts
from parallel_ops.layers.replicated import ReplicatedLinear
from parallel_ops.models.config import TransformerConfig, plain_name
from parallel_ops.models.huggingface.adapters import Adapters, module_of, write_adapters
from parallel_ops.models.huggingface.config_json import family_of, options_of
from parallel_ops.models.lora_config import Lora
from parallel_ops.models.transformer import Transformer


def adaptable(model: Transformer) -> dict[str, nn.Module]:
    """The modules of the linears that can have adapters, by the linears' plain names.

    Experts have two, ``"....experts.gate_up"`` and ``"....experts.down"``. Layers that predict further tokens have
    none: Transformers' models, of which adapters are, do not have these layers. Nor have dense MLPs and shared experts
    of models with experts: peft (0.21.2) takes modules of their names, such as ``gate_proj``, for those of experts.
    """
    experts = model.config.experts is not None
    found: dict[str, nn.Module] = {}
    for number, layer in model.layers.items():
        for name, module in layer.named_modules() if int(number) < model.config.num_layers else ():
            plain = plain_name(f"layers.{number}.{name}")
            if isinstance(module, Experts):
                found |= {f"{plain}.gate_up": module, f"{plain}.down": module}
            elif isinstance(module, (ParallelLinear, ReplicatedLinear)) and not (experts and name.startswith("mlp.")):
                found[plain] = module
    return found


def linear_names(config: TransformerConfig) -> list[str]:
    """The names of all linears of a model that can have adapters, whatever stages a rank has."""
    return list(adaptable(Transformer(config, device="meta")))


def chosen(config: TransformerConfig, names: Sequence[str], lora: Lora) -> list[str]:
    """The linears, of all ``names``, that the targets of ``lora`` select.

    Raises:
        ValueError: a target selects none; a model of no Hugging Face family; experts with dropout.
    """
    targets = lora.targets
    family = family_of(options_of(config, {}))
    theirs = {name: module_of(family, name)[0] for name in names}

    def selects(target: str, name: str) -> bool:
        given = ((name, target), (theirs[name], target), (theirs[name], f"*.{target}"))
        return any(fnmatchcase(own, pattern) for own, pattern in given)

    for target in targets:
        if not any(selects(target, name) for name in names):
            some = f"{names[0]} or {', '.join(dict.fromkeys(name.rpartition('.')[2] for name in theirs.values()))}"
            raise ValueError(f"{target!r} matches no linear; their names are like {some}")
    found = [name for name in names if any(selects(target, name) for target in targets)]
    if lora.dropout and (experts := [name for name in found if is_of_experts(name)]):
        raise ValueError(f"adapters of experts need dropout of 0, as peft's do, got {lora.dropout} for {experts[0]}")
    return found


def add_adapters(model: Transformer, lora: Lora) -> None:
    """Adds adapters to a model, before it is sharded, and freezes all its other parameters.

    Targets are of the whole model: a pipeline stage may have none of the linears that they select.

    Raises:
        ValueError: see ``chosen``; the model has adapters.
    """
    if model.lora is not None:
        raise ValueError("add_adapters: the model has adapters")
    linears = adaptable(model)
    every = list(linears) if model.stages is None else linear_names(model.config)
    with torch.random.fork_rng(devices=[]):  # so that the model is initialised as it is without adapters
        for name in chosen(model.config, every, lora):
            module = linears.get(name)
            if isinstance(module, Experts):
                module.add_lora(name.rpartition(".")[2], rank=lora.rank, alpha=lora.alpha)
            elif isinstance(module, (ParallelLinear, ReplicatedLinear)):
                module.add_lora(rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    model.lora = lora


def adapted_linears(model: Transformer) -> list[str]:
    """The names of the linears that have adapters, in all stages."""
    return [] if model.lora is None else chosen(model.config, linear_names(model.config), model.lora)


def save_adapters(
    model: Transformer, folder: str | Path, *, base: str | None = None, dtype: torch.dtype | None = None
) -> None:
    """Writes the adapters of a model as peft does; all ranks call it, and global rank 0 writes.

    Args:
        folder: must not exist, or be empty. base: folder or name of the model that they are of.
        dtype: of the tensors; ``None`` for that of the parameters.

    Raises:
        ValueError: the model has no adapters, or pipeline stages. OSError: the folder cannot be written; on rank 0.
    """
    lora = model.lora
    if lora is None:
        raise ValueError("save_adapters: the model has no adapters; add them with add_adapters")
    if model.stages is not None:
        raise ValueError(
            "save_adapters: the model has pipeline stages, of which a rank has a part; save a checkpoint and export it"
        )
    given = {plain_name(name): t for name, t in model.state_dict().items() if is_adapter(name)}
    whole: dict[str, Tensor] = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in given.items()}
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    family = family_of(options_of(model.config, model.loaded_options))
    every = list(adaptable(model))
    adapters = Adapters(lora.rank, lora.alpha, lora.dropout, adapted_linears(model), every, base)
    write_adapters(Path(folder), family, adapters, whole.__getitem__, dtype=dtype)
