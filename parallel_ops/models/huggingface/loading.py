"""Loading of Hugging Face folders, ``config.json`` and safetensors, into a model that is sharded over ranks.

Every rank opens all files and checks all names and shapes against the whole model before it copies its slices. So a
rank reads only what it keeps, and a folder that does not fit changes nothing.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel_ops._internal.distributed.shards import local_box
from parallel_ops.layers.lora import is_adapter
from parallel_ops.models.config import TransformerConfig, plain_name
from parallel_ops.models.huggingface.config_json import config_of, differences
from parallel_ops.models.huggingface.tensor_files import (
    CONFIG,
    INDEX,
    SINGLE,
    Files,
    ShapesOf,
    Slices,
    read_json,
    safetensors,
)

# Fields in which a model may differ from the config.json of its weights: they do not change what the weights are.
_OF_TRAINING = ("seq_length", "attention_dropout", "init_std")


class Loadable(Protocol):
    """The parts of a model that loading and saving use; see ``PretrainedModel``."""

    config: TransformerConfig
    loaded_options: dict[str, Any]

    @staticmethod
    def global_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]: ...

    def state_dict(self) -> dict[str, Any]: ...


def config_from_pretrained(folder: str | Path) -> TransformerConfig:
    """The configuration in the ``config.json`` of a Hugging Face folder.

    Raises:
        FileNotFoundError: there is no such file. ValueError: an unknown family, or an unsupported option.

    Examples:
        >>> import json, pathlib, tempfile
        >>> from parallel_ops.models import config_from_pretrained
        >>> config = {"model_type": "llama", "vocab_size": 1000, "num_hidden_layers": 2, "hidden_size": 64,
        ...           "num_attention_heads": 4, "intermediate_size": 176, "max_position_embeddings": 128,
        ...           "rms_norm_eps": 1e-5}
        >>> folder = pathlib.Path(tempfile.mkdtemp())  # of a download
        >>> _ = (folder / "config.json").write_text(json.dumps(config))
        >>> config_from_pretrained(folder).num_layers
        2
    """
    return _config_of(Path(folder), read_json(Path(folder) / CONFIG))


def _config_of(folder: Path, options: dict[str, Any]) -> TransformerConfig:
    try:
        config = config_of(options)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} {error}") from error
    # Transformers, whose models have none, keeps their number in config.json and leaves their tensors out.
    return (
        replace(config, prediction_layers=0)
        if config.prediction_layers and not _has_further(folder, config)
        else config
    )


def _has_further(folder: Path, config: TransformerConfig) -> bool:
    """False if the folder has files, but no tensor of layers behind the last."""
    names: Iterable[str]
    if (folder / SINGLE).exists():
        try:
            with safetensors().safe_open(folder / SINGLE, framework="pt") as opened:
                names = list(opened.keys())
        except safetensors().SafetensorError:
            return True  # which is an error when it is loaded
    elif (folder / INDEX).exists():
        names = read_json(folder / INDEX).get("weight_map") or ()
    else:
        return True
    return any(f"layers.{config.num_layers}." in name for name in names)


def check(config: TransformerConfig, folder: Path, shapes_of: ShapesOf) -> None:
    """Checks the files of a folder before a model of this configuration takes memory.

    Raises:
        FileNotFoundError, ValueError: as ``PretrainedModel.load_pretrained``.
    """
    with contextlib.ExitStack() as stack:
        Files(folder, read_json(folder / CONFIG), stack).check(config, shapes_of)


def load(model: Loadable, folder: Path, *, strict: bool) -> None:
    """See ``PretrainedModel.load_pretrained``."""
    options = read_json(folder / CONFIG)
    config = replace(_config_of(folder, options), **{name: getattr(model.config, name) for name in _OF_TRAINING})
    differing = differences(config, model.config)
    if strict and differing:
        raise ValueError(f"{folder / CONFIG} differs from the model's configuration in {', '.join(differing)}")
    with contextlib.ExitStack() as stack:
        files = Files(folder, options, stack)
        files.check(model.config, model.global_shapes)
        parameters = parameters_of(model)
        slices = {name: _local_slices(t) for name, t in parameters.items()}
        for copy, name in files.copies(model.config).items():
            if name in parameters:
                files.check_copy(copy, name, parameters[name].shape, slices[name])
        with torch.no_grad():
            for name, t in parameters.items():
                local = t.to_local() if isinstance(t, DTensor) else t
                if local.numel():
                    local.copy_(files.read(name, t.shape, slices[name]))
    model.loaded_options = options


def parameters_of(model: Loadable) -> dict[str, Tensor]:
    """The model's parameters by plain name, sharing its memory; under FSDP2 the sharded ones, at any time of a step.
    Adapters are left out.

    Raises:
        ValueError: parameters on the meta device.
    """
    parameters = {plain_name(name): t for name, t in model.state_dict().items() if not is_adapter(name)}
    if any(t.device.type == "meta" for t in parameters.values()):
        raise ValueError("Transformer: the parameters are on the meta device; call to_empty first")
    return parameters


def _local_slices(t: Tensor) -> Slices:
    """The slices of a parameter that this rank holds."""
    starts, sizes = local_box(t)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
