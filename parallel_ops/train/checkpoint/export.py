"""Exports a checkpoint of any plan as a Hugging Face folder, without a GPU and without a process group.

One parameter is in memory at a time, read from the parts that the ranks of the run have written.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from parallel_ops.layers.lora import is_adapter, names_of
from parallel_ops.models import Transformer, TransformerConfig
from parallel_ops.models.huggingface.adapters import Adapters, write_adapters
from parallel_ops.models.huggingface.config_json import family_of, options_of
from parallel_ops.models.huggingface.streaming import Folder
from parallel_ops.models.lora import adaptable, add_adapters
from parallel_ops.models.lora_config import Lora
from parallel_ops.train.checkpoint import checkpoints
from parallel_ops.train.checkpoint.checkpoints import CheckpointError, Description
from parallel_ops.train.checkpoint.metadata import empty, sizes_of
from parallel_ops.train.checkpoint.resume import LORA, has_base, shape_of
from parallel_ops.train.checkpoint.tokenizer_files import tokenizer_files
from parallel_ops.train.config_file import describe_errors
from parallel_ops.train.settings.model import ModelSettings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    checkpoint: Path, folder: Path, *, dtype: str | None = None, tokenizer: Path | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:  # fmt: skip
    """Writes the model of a checkpoint as a Hugging Face folder; of a run with ``lora``, its adapters as peft does. Of
    adapters of a base that no folder has, as of a new phase, the model with them added to its weights.

    Args:
        checkpoint: A checkpoint, or a folder whose newest checkpoint is taken.
        folder: Must not exist, or be empty.
        dtype: ``"bf16"``, ``"fp16"`` or ``"fp32"``; ``None`` for the precision of the run.
        tokenizer: A ``tokenizer.json``, or a Hugging Face folder, whose tokenizer is copied into ``folder``. It says
            where generation ends, in ``config.json`` and ``generation_config.json``, unless the run's base model did.
        report: Called with bytes done, and all.

    Returns:
        What was written: ``checkpoint``, ``folder``, ``step``, ``model_type``, ``dtype``, ``parameters``, ``bytes``.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or of another model than ``Transformer``.
        ValueError: No Hugging Face family has the model, or the tokenizer has more tokens than it.
        OSError: The folder cannot be written.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype must be {', '.join(DTYPES)}, got {dtype!r}")
    if not checkpoint.exists():
        raise FileNotFoundError(f"{checkpoint} does not exist")
    source = checkpoints.newest(checkpoint)
    description = checkpoints.describe(source)
    config = config_of(source, description)
    of_run = description.rest.get("dtype")
    chosen = dtype or (of_run if of_run in DTYPES else "fp32")
    metadata = checkpoints.open_checked(source, None)
    stored = sizes_of(metadata)
    model = Transformer(config, device="meta")
    every, adapted = list(adaptable(model)), description.model.get(LORA)
    if adapted is not None:
        _add(model, adapted, source)
    merges, found = adapted is not None and has_base(description), model.state_dict().items()
    shapes = {name: tuple(t.shape) for name, t in found if adapted is None or merges or is_adapter(name)}
    for name, shape in shapes.items():
        if (size := stored.get(f"model.{name}")) != shape:
            got = "nothing" if size is None else list(size)
            raise CheckpointError(f"{source}: {name} must be {list(shape)}, got {got}")

    merged = {weight: adapter for weight, *adapter in map(names_of, adapted["linears"] if adapted and merges else ())}

    def read_one(name: str) -> Tensor:
        tensor = empty(metadata, f"model.{name}")
        checkpoints.load({f"model.{name}": tensor}, source, None, metadata)
        return tensor

    def read(name: str) -> Tensor:
        own = read_one(name)
        if name not in merged:
            return own
        assert adapted is not None
        a, b = (read_one(part).float() for part in merged[name])
        return own.float() + adapted["alpha"] / adapted["rank"] * (b @ a)

    loaded = description.rest.get("config_json")
    given = loaded if isinstance(loaded, dict) else {}
    more: dict[str, bytes] = {}
    if tokenizer is not None:
        of_base = {key: given[key] for key in given if key.endswith("_token_id") and given[key] is not None}
        more, ids = tokenizer_files(tokenizer, config.vocab_size, of_base)
        given = {**given, **ids}
    if adapted is not None and not merges:
        options, of_run = options_of(config, given), description.rest.get("adapters", {})
        written = write_adapters(
            folder, family_of(options),
            Adapters(adapted["rank"], adapted["alpha"], of_run.get("dropout", 0.0), adapted["linears"], every,
                     of_run.get("base")),
            read, dtype=DTYPES[chosen], more=more,
        )  # fmt: skip
        report(written, written)
        return _result(source, folder, description, options["model_type"], chosen, written)
    whole = {name: shape for name, shape in shapes.items() if not is_adapter(name)}
    content = Folder(config, given, whole, dict.fromkeys(whole, DTYPES[chosen]))
    last = functools.lru_cache(maxsize=1)(read)  # all experts of a layer are one parameter, and several tensors
    content.write(folder, content.pieces(lambda piece, name: last(name)[piece.place]), more=more, report=report)
    return _result(source, folder, description, content.options["model_type"], chosen, content.nbytes)


def _result(
    source: Path, folder: Path, description: Description, model_type: str, dtype: str, written: int
) -> dict[str, Any]:
    return {
        "checkpoint": str(source), "folder": str(folder), "step": description.step, "model_type": model_type,
        "dtype": dtype, "parameters": written // DTYPES[dtype].itemsize, "bytes": written,
    }  # fmt: skip


def _add(model: Transformer, adapted: Any, source: Path) -> None:
    """Adds the adapters of a checkpoint, which ``description.model`` has, to its model."""
    try:
        add_adapters(model, Lora(adapted["rank"], adapted["alpha"], 0.0, tuple(adapted["linears"])))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{source} has adapters that this version does not have: {error}") from None


def config_of(source: Path, description: Description) -> TransformerConfig:
    """The configuration of a checkpoint's model.

    Raises:
        CheckpointError: It is of a model of another class, or of another version of this package.
    """
    if "class" in description.model:
        raise CheckpointError(f"{source} is of a {description.model['class']}, not of a Transformer of this package")
    try:
        recorded = description.rest.get("model")
        whole = recorded if isinstance(recorded, dict) else description.model
        given = {name: value for name, value in whole.items() if value is not None}
        config = TransformerConfig(**ModelSettings.model_validate(given).shape)
    except (ValueError, TypeError) as error:
        reason = describe_errors(error) if isinstance(error, ValidationError) else error
        raise CheckpointError(f"{source} is of a model that this version does not have: {reason}") from None
    own = shape_of(config)
    if differing := [name for name in description.model if name != LORA and own.get(name) != description.model[name]]:
        raise CheckpointError(f"{source} is of a model that this version does not have: {', '.join(differing)}")
    return config
