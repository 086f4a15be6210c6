"""Hugging Face folders: config.json and safetensors."""

from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallel_ops.layers.parameters import ShardedModule
from parallel_ops.models.config import TransformerConfig
from parallel_ops.models.huggingface import loading, saving

_Model = TypeVar("_Model", bound="PretrainedModel")


class PretrainedModel(ShardedModule):
    """What ``Transformer`` has of them.

    Attributes:
        loaded_options: the config.json of the folder that it was loaded from; empty for none.
    """

    def __init__(self, config: TransformerConfig, mesh: DeviceMesh | None) -> None:
        super().__init__(mesh)
        self.config = config
        self.loaded_options: dict[str, Any] = {}

    @classmethod
    def from_pretrained(
        cls: type[_Model],
        folder: str | Path,
        *,
        config: TransformerConfig | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> _Model:
        """A model from a Hugging Face folder of a family that ``huggingface/families.py`` knows.

        Args:
            folder: has ``config.json`` and ``model.safetensors``, or files and ``model.safetensors.index.json``.
            config: in place of what ``config.json`` says, with the same tensors: to train without its dropout, say.
            device, options: as of the class; the tensors are cast to its ``dtype``, not the reverse.

        Raises: as ``load_pretrained``.
        """
        built = config or loading.read_config(Path(folder))[0]
        loading.check(built, Path(folder))
        model = cast(Any, cls)(built, device="meta", **options)
        model.to_empty(device=torch.get_default_device() if device is None else device)
        model.load_pretrained(folder, strict=config is None)
        return cast(_Model, model)

    def load_pretrained(self, folder: str | Path, *, strict: bool = True) -> None:
        """Fills the parameters from a Hugging Face folder; each rank reads its parts, also those of FSDP2, alone.

            model = Transformer(TransformerConfig.from_pretrained(folder), mesh=mesh, device="meta")
            ...                                     # fully_shard each of model.layers and model
            model.to_empty(device="cuda")
            model.load_pretrained(folder)

        Args:
            strict: config.json must say this model's configuration, but for dropout, initialisation and longest
                sequence; else only its tensors must fit.

        Raises:
            FileNotFoundError, ValueError: files or tensors that are missing, too many or of another shape, another
            family or configuration: by name, on every rank, before the first parameter is changed.
            ImportError: safetensors is not installed.
        """
        loading.load(self, Path(folder), strict=strict)

    def save_pretrained(
        self, folder: str | Path, *, dtype: torch.dtype | None = None, file_bytes: int = 5_000_000_000
    ) -> None:
        """Writes a folder that Hugging Face's transformers opens as the same model.

        Args:
            folder: must not exist, or be empty. Global rank 0 writes it; all ranks that share the model with it call
                this, and others may.
            dtype: of the tensors; ``None`` for that of the parameters.
            file_bytes: the size of a file at most. A rank holds that much in host memory.

        Raises:
            ValueError: a configuration that no family has (dropout aside), a model that is not whole, another dtype
            than can be loaded.
            RuntimeError: the folder cannot be written; on every rank that shares the model. ImportError: as above.
        """
        saving.save(self, Path(folder), dtype=dtype, file_bytes=file_bytes)
