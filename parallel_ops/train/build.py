"""Builds the samples and the model of a trainer from its settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallel_ops.comm import ParallelMesh
from parallel_ops.models import Transformer
from parallel_ops.train.data.packing import Samples
from parallel_ops.train.data.split import split
from parallel_ops.train.data.tokens import TokenStream
from parallel_ops.train.parallelize_model import parallelize

if TYPE_CHECKING:
    from parallel_ops.train.config import Settings


def build_samples(settings: "Settings", stream: TokenStream | None) -> tuple[Samples, Samples | None]:
    """The samples of ``stream``, or of ``settings.data.paths``, and those to evaluate on, if any.

    Raises:
        ValueError, OSError: The data cannot be read.
    """
    data, own = settings.data, settings.evaluation

    def opened(paths: Sequence[Path]) -> TokenStream:
        return TokenStream(paths, dtype=data.dtype, eos_id=data.eos_id, column=data.column)

    stream = opened(data.paths) if stream is None else stream
    held_out: Samples | None = None
    options: dict[str, Any] = {"seq_length": settings.seq_length, "document_mask": data.document_mask}
    if settings.evaluates:
        try:
            other = opened(own.paths) if own.paths else None
            if other is None:
                stream, other = split(stream, own.share)
            held_out = Samples(other, seed=None, **options)
        except ValueError as error:
            raise ValueError(f"evaluation.{'paths' if own.paths else 'share'}: {error}") from error
    return Samples(stream, seed=settings.run.seed, shuffle=data.shuffle, **options), held_out


def build_model(settings: "Settings", mesh: ParallelMesh, device: torch.device, model: nn.Module | None) -> nn.Module:
    """``model``, or that of ``settings.model`` with its initial or pretrained weights, parallelized over ``mesh``."""
    options: Any = {"recompute_every": settings.recompute.every, "compile": settings.run.compile}
    if model is not None:
        return parallelize(model.to(device), mesh, settings.plan, **options)
    folder = settings.model.dir
    if folder is not None:
        Transformer.check_pretrained(folder, settings.config)
    empty = Transformer(settings.config, overlap=settings.model.overlap, device="meta")
    built = parallelize(empty, mesh, settings.plan, **options)
    # Offloaded parameters stay on the CPU.
    built.to_empty(device="cpu" if settings.plan.offload != "none" else device)
    if folder is None:
        built.reset_parameters()  # type: ignore[operator]
    else:
        built.load_pretrained(folder)  # type: ignore[operator]
    return built
