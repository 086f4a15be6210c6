"""Loading and saving as methods of a model."""

import abc
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallel_ops.layers.parameters import ShardedModule
from parallel_ops.models.config import TransformerConfig
from parallel_ops.models.huggingface import loading, saving

_Model = TypeVar("_Model", bound="PretrainedModel")


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
        built = config or loading.config_from_pretrained(folder)
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
        loading.check(config, Path(folder), cls.global_shapes)

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
        loading.load(self, Path(folder), strict=strict)

    def save_pretrained(
        self, folder: str | Path, *, dtype: torch.dtype | None = None, file_bytes: int = 5_000_000_000
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
        saving.save(self, Path(folder), dtype=dtype, file_bytes=file_bytes)
