"""Hugging Face folders as methods of a model: loading, saving, checks.

Every rank opens all files and checks all names and shapes against the whole model before it copies its slices. So a
rank reads only what it keeps, and a folder that does not fit changes nothing.
"""

import abc
import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel_ops._internal.distributed.shards import local_box
from parallel_ops._internal.module_names import some_of
from parallel_ops.layers.lora import is_adapter
from parallel_ops.layers.parameters import ShardedModule
from parallel_ops.models.config import TransformerConfig, plain_name
from parallel_ops.models.huggingface.config_json import config_of, differences
from parallel_ops.models.huggingface.saving import save
from parallel_ops.models.huggingface.streaming import DTYPES, FILE_BYTES
from parallel_ops.models.huggingface.tensor_files import (
    CONFIG,
    INDEX,
    SINGLE,
    Files,
    Slices,
    read_options,
    safetensors,
)

_Model = TypeVar("_Model", bound="PretrainedModel")
# Fields in which a model may differ from the config.json of its weights: they do not change what the weights are.
_OF_TRAINING = ("seq_length", "attention_dropout", "init_std")


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
    return _config_of(Path(folder), read_options(Path(folder) / CONFIG))


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
        names = read_options(folder / INDEX).get("weight_map") or ()
    else:
        return True
    return any(f"layers.{config.num_layers}." in name for name in names)


class PretrainedModel(ShardedModule):
    """A model that is loaded from and saved to Hugging Face folders; base class of ``Transformer``.

    Attributes:
        config: its configuration.
        loaded_options: the config.json of the folder that it was loaded from; empty if it was not.
    """

    def __init__(self, config: TransformerConfig, mesh: DeviceMesh | None) -> None:
        super().__init__(mesh)
        self.config = config
        self.loaded_options: dict[str, Any] = {}

    @staticmethod
    @abc.abstractmethod
    def global_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
        """The whole shape of each parameter of a model of this configuration, by name."""

    @classmethod
    def from_pretrained(
        cls: type[_Model],
        folder: str | Path,
        *,
        config: TransformerConfig | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> _Model:
        """A model from a Hugging Face folder of a family that ``huggingface/families.py`` lists.

        Args:
            folder: has ``config.json`` and ``model.safetensors``, or files and ``model.safetensors.index.json``.
            config: replaces the configuration in ``config.json``; the tensors must be the same. For training without
                its dropout, for example.
            device: where the parameters are; ``None`` for torch's default device.
            options: other arguments of the class. The tensors are cast to its ``dtype``.

        Raises: as ``load_pretrained``.
        """
        built = config or config_from_pretrained(folder)
        cls.check_pretrained(folder, built)
        model = cast(Any, cls)(built, device="meta", **options)
        model.to_empty(device=torch.get_default_device() if device is None else device)
        model.load_pretrained(folder, strict=config is None)
        return cast(_Model, model)

    @classmethod
    def check_pretrained(cls, folder: str | Path, config: TransformerConfig) -> None:
        """Checks the files of a folder before a model of this configuration takes memory.

        Raises: as ``load_pretrained``.
        """
        with contextlib.ExitStack() as stack:
            Files(Path(folder), read_options(Path(folder) / CONFIG), stack).check(config, cls.global_shapes)

    def load_pretrained(self, folder: str | Path, *, strict: bool = True) -> None:
        """Fills the parameters from a Hugging Face folder. Each rank reads its own shards only, also those of FSDP2.

            model = Transformer(config_from_pretrained(folder), tp_mesh=mesh, device="meta")
            ...                                     # fully_shard each of model.layers and model
            model.to_empty(device="cuda")
            model.load_pretrained(folder)

        Args:
            strict: config.json must match this model's configuration, except in dropout, initialisation and longest
                sequence. Otherwise only the tensors must fit.

        Raises:
            FileNotFoundError, ValueError: missing or unexpected files or tensors, tensors of another shape, another
                family or configuration: by name, on every rank, before the first parameter is changed.
            ImportError: safetensors is not installed.
        """
        folder = Path(folder)
        options = read_options(folder / CONFIG)
        config = replace(_config_of(folder, options), **{name: getattr(self.config, name) for name in _OF_TRAINING})
        differing = differences(config, self.config)
        if strict and differing:
            raise ValueError(f"{folder / CONFIG} differs from the model's configuration in {', '.join(differing)}")
        with contextlib.ExitStack() as stack:
            files = Files(folder, options, stack)
            files.check(self.config, self.global_shapes)
            parameters = self._parameters_of_files()
            slices = {name: _local_slices(t) for name, t in parameters.items()}
            for copy, name in files.copies(self.config).items():
                if name in parameters:
                    files.check_copy(copy, name, parameters[name].shape, slices[name])
            with torch.no_grad():
                for name, t in parameters.items():
                    local = t.to_local() if isinstance(t, DTensor) else t
                    if local.numel():
                        local.copy_(files.read(name, t.shape, slices[name]))
        self.loaded_options = options

    def _parameters_of_files(self) -> dict[str, Tensor]:
        """The parameters by plain name, sharing their memory; under FSDP2 the sharded ones, at any time of a step.
        Adapters are left out.

        Raises:
            ValueError: parameters on the meta device.
        """
        parameters = {plain_name(name): t for name, t in self.state_dict().items() if not is_adapter(name)}
        if any(t.device.type == "meta" for t in parameters.values()):
            raise ValueError("Transformer: the parameters are on the meta device; call to_empty first")
        return parameters

    def save_pretrained(
        self, folder: str | Path, *, dtype: torch.dtype | None = None, file_bytes: int = FILE_BYTES
    ) -> None:
        """Writes a folder that Hugging Face's transformers opens as the same model.

        Args:
            folder: must not exist, or be empty. Global rank 0 writes it; all ranks that share the model with it must
                call this, and others may.
            dtype: of the saved tensors; ``None`` for the parameters' dtype.
            file_bytes: largest size of a file that has several tensors. Rank 0 holds one tensor in host memory.

        Raises:
            ValueError: a configuration that no family has (dropout aside), an incomplete model, a dtype that cannot be
                loaded.
            RuntimeError: the folder cannot be written; on every rank that shares the model.
            ImportError: safetensors is not installed.
        """
        if any(is_adapter(name) for name in self.state_dict()):
            raise ValueError("save_pretrained: the model has adapters; write them with models.lora.save_adapters")
        parameters = self._parameters_of_files()
        if dtype not in (None, *DTYPES):
            raise ValueError(f"save_pretrained: dtype must be float64, float32, float16 or bfloat16, got {dtype}")
        if absent := self.global_shapes(self.config).keys() - parameters.keys():
            names = some_of(sorted(absent), 3)
            raise ValueError(f"save_pretrained: the whole model is needed, and {names} is not on this rank")
        save(Path(folder), self.config, self.loaded_options, parameters, dtype=dtype, file_bytes=file_bytes)


def _local_slices(t: Tensor) -> Slices:
    """The slices of a parameter that this rank holds."""
    starts, sizes = local_box(t)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
