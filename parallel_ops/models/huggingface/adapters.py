"""Writes low-rank adapters as the files that peft writes, without peft.

``adapter_config.json`` is peft's ``LoraConfig``; ``adapter_model.safetensors`` has ``lora_A.weight`` ``[r, in]`` and
``lora_B.weight`` ``[out, r]`` of each linear of the Hugging Face model, under its name there. Where that model has one
linear for several of this package (``c_attn`` of GPT-2), the adapters of the parts are one adapter of a larger rank:

    A = [A_q; A_k; A_v]         B = diag(B_q, B_k, B_v)         with alpha in the same proportion

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel_ops.layers.lora import is_of_experts, names_of
from parallel_ops.models.huggingface.family import Family, TensorMapping
from parallel_ops.models.huggingface.streaming import new_folder
from parallel_ops.models.huggingface.tensor_files import safetensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class Adapters:
    """Adapters as files describe them.

    Attributes:
        rank, alpha, dropout: See ``layers.lora``.
        linears: Names of the linears that have adapters. every: Names of all that could have some.
        base: Folder or name of the model that they are of, or ``None``.
    """

    rank: int
    alpha: float
    dropout: float
    linears: Sequence[str]
    every: Sequence[str]
    base: str | None


def module_of(family: Family, linear: str) -> tuple[str, TensorMapping]:
    """The name of a linear in the Hugging Face model, and how its weight is stored.

    Raises:
        ValueError: The family has no such linear.
    """
    weight, *_ = names_of(linear)
    if is_of_experts(linear):  # Transformers 5 has one parameter for all of a layer, whatever its files have
        stored, layer = family.pieces(weight, (1, 2, 1))[0].stored, linear.split(".")[1]
        return f"model.layers.{layer}.mlp.experts.{linear.rpartition('.')[2]}_proj", stored
    stored = family.pieces(weight, (1, 1))[0].stored
    return stored.name.removesuffix(".weight"), stored


def write_adapters(
    folder: Path, family: Family, adapters: Adapters, read: Callable[[str], Tensor], *, dtype: torch.dtype | None,
    more: Mapping[str, bytes] | None = None,
) -> int:  # fmt: skip
    """Writes a folder that ``peft.PeftModel.from_pretrained`` opens; see ``new_folder``.

    Args:
        folder: Must not exist, or be empty.
        read: Returns a whole parameter by its name, such as ``"layers.0.attention.q.lora.a"``.
        dtype: Of the tensors; ``None`` for that of the parameters. more: Contents of further files by name.

    Returns:
        The bytes of all tensors.

    Raises:
        FileExistsError: The folder has files. OSError: It cannot be written. ImportError: safetensors is not installed.
    """
    modules: dict[str, list[tuple[str, TensorMapping]]] = {}
    for linear in adapters.linears:
        name, stored = module_of(family, linear)
        modules.setdefault(name, []).append((linear, stored))
    tensors: dict[str, Tensor] = {}
    for name, parts in modules.items():
        a, b = _joined(parts, read)
        if a.dim() == 3:
            name, a, b = _of_experts(name, modules, parts[0][1], a, b)  # noqa: PLW2901
        for kind, tensor in (("lora_A", a), ("lora_B", b)):
            tensors[f"base_model.model.{name}.{kind}.weight"] = tensor.detach().to("cpu", dtype).contiguous().clone()
    config = _config(family, adapters, modules)
    with new_folder(folder) as part:
        safetensors().torch.save_file(tensors, part / TENSORS, metadata={"format": "pt"})
        (part / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for name, content in (more or {}).items():
            (part / name).write_bytes(content)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _joined(parts: Sequence[tuple[str, TensorMapping]], read: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """A and B of one linear of the files."""
    names = [(*names_of(linear), stored) for linear, stored in parts]
    found = [(read(a), read(b), stored) for _, a, b, stored in names]
    a, b, stored = found[0]
    if stored.parts == 1 or a.dim() == 3:
        return a, b
    rank, rows = a.shape[0], b.shape[0]
    whole = b.new_zeros(rows * stored.parts, rank * len(found))
    for number, (_, own, place) in enumerate(found):
        whole[place.part * rows : (place.part + 1) * rows, number * rank : (number + 1) * rank] = own
    return torch.cat([a for a, _, _ in found]), whole


def _of_experts(
    name: str, modules: Mapping[str, Any], stored: TensorMapping, a: Tensor, b: Tensor
) -> tuple[str, Tensor, Tensor]:
    """Name, A and B of a parameter of experts, as peft's ``ParamWrapper`` has them: of two parameters of one module,
    the wrapper of the first is inside that of the second."""
    module, _, own = name.rpartition(".")
    inner = own == "gate_up_proj" and f"{module}.down_proj" in modules
    if stored.interleaved:
        b = b.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return f"{module}.base_layer" if inner else module, a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)


def _config(
    family: Family, adapters: Adapters, modules: Mapping[str, Sequence[tuple[str, TensorMapping]]]
) -> dict[str, Any]:
    # Those of which several are one have a rank of their own.
    wide = {name: len(parts) for name, parts in modules.items() if len(parts) > 1}
    every = {module_of(family, linear)[0]: is_of_experts(linear) for linear in adapters.every}
    chosen, names = (
        [[n for n in own if every[n] == of_experts] for of_experts in (False, True)] for own in (modules, every)
    )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "auto_mapping": None,
        "base_model_name_or_path": adapters.base,
        "revision": None,
        "inference_mode": True,
        "r": adapters.rank,
        "lora_alpha": _number(adapters.alpha),
        "lora_dropout": adapters.dropout,
        "target_modules": _targets(chosen[0], names[0], 1),
        **({"target_parameters": _targets(chosen[1], names[1], 2)} if chosen[1] else {}),
        "rank_pattern": {name: count * adapters.rank for name, count in wide.items()},
        "alpha_pattern": {name: _number(count * adapters.alpha) for name, count in wide.items()},
        # The linears of GPT-2 are stored [in, out].
        "fan_in_fan_out": any(
            stored.transposed and not stored.stacked for parts in modules.values() for _, stored in parts
        ),
        "bias": "none",
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _targets(chosen: Sequence[str], every: Sequence[str], parts: int) -> list[str]:
    """``target_modules``: the last ``parts`` of the names where they select these alone, or the names."""
    ends = {name: ".".join(name.split(".")[-parts:]) for name in every}
    last = sorted({ends[name] for name in chosen})
    return last if [name for name in every if ends[name] in last] == list(chosen) else sorted(chosen)


def _number(value: float) -> int | float:
    """peft's alpha is an integer where it can be."""
    return int(value) if float(value).is_integer() else value
