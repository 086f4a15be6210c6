"""Builds the samples and the model of a trainer from its settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallel_ops.comm import ParallelMesh
from parallel_ops.layers.lora import LoraAdapter
from parallel_ops.models import Transformer
from parallel_ops.models.config import plain_name
from parallel_ops.models.lora import add_adapters
from parallel_ops.ops.float8_recipes import device_problem
from parallel_ops.planner.compute.documents import pair_work
from parallel_ops.train.data.any_samples import AnySamples
from parallel_ops.train.data.by_length import ByLength
from parallel_ops.train.data.growing import Growing
from parallel_ops.train.data.loader import Loader
from parallel_ops.train.data.mixture import Mixture
from parallel_ops.train.data.packing import Samples
from parallel_ops.train.data.split import split
from parallel_ops.train.data.tokens import TokenStream
from parallel_ops.train.parallelize_model import check_sizes, parallelize
from parallel_ops.train.settings import patterns

if TYPE_CHECKING:
    from parallel_ops.train.config import Settings


# Between the seeds of two sources: odd and large, so that seeds of runs and of their sources do not coincide.
_SEEDS = 0x1E3779B97F4A7C15


def build_samples(settings: "Settings", stream: TokenStream | None) -> tuple[AnySamples, Samples | None]:
    """The samples of ``stream``, or of ``settings.data``, and those to evaluate on, if any.

    Those of growing folders have no parts yet.

    Raises:
        ValueError, OSError: The data cannot be read.
    """
    data, own = settings.data, settings.evaluation

    def opened(paths: Sequence[Path]) -> TokenStream:
        return TokenStream(
            paths, dtype=data.dtype, eos_id=data.eos_id, column=data.column, masked=not data.prompt_loss,
            ignore=data.ignore,
        )  # fmt: skip

    if stream is not None:
        streams = [stream]
    elif data.growing:
        streams = []
    else:
        given = [data.paths] if data.paths else [source.paths for source in data.sources]
        streams = [opened(paths) for paths in given]
    held_out: Samples | None = None
    options: dict[str, Any] = {
        "seq_length": settings.seq_length, "document_mask": data.document_mask,
        "best_fit": data.packing == "best_fit", "prompt_loss": data.prompt_loss,
    }  # fmt: skip
    if settings.evaluates:
        try:
            other = opened(own.paths) if own.paths else None
            if other is None:
                parts = [split(each, own.share) for each in streams]
                streams = [part[0] for part in parts]
                other = TokenStream.of([file for part in parts for file in part[1].files])
            held_out = Samples(other, seed=None, **options)
        except ValueError as error:
            raise ValueError(f"evaluation.{'paths' if own.paths else 'share'}: {error}") from error
    if data.growing and stream is None:
        options["shuffle"] = data.shuffle
        return Growing(data.paths, data.dtype, opened, seed=settings.run.seed, **options), held_out
    found: list[Samples] = []
    for number, each in enumerate(streams):
        # The first source has the order that it would have alone.
        seed = (settings.run.seed + number * _SEEDS) % 2**63
        try:
            found.append(Samples(each, seed=seed, shuffle=data.shuffle, **options))
        except ValueError as error:
            raise ValueError(f"data.sources.{number}: {error}" if len(streams) > 1 else str(error)) from error
    if len(found) == 1:
        return found[0], held_out
    return Mixture(found, [source.weight for source in data.sources]), held_out


def checked_device(settings: "Settings", mesh: ParallelMesh) -> torch.device:
    """The device of this rank.

    Raises:
        ValueError: The mesh has other sizes than the plan.
    """
    from parallel_ops.train.planner_bridge import uses_cuda  # needs pydantic, as settings do

    check_sizes("Trainer", mesh, settings.plan)
    return torch.device("cuda", torch.cuda.current_device()) if uses_cuda(settings) else torch.device("cpu")


def compared_values(settings: "Settings", samples: AnySamples, held_out: Samples | None) -> dict[str, Any]:
    """Sizes of the data, which all ranks must share, and keys of the logs that do not concern rank 0 alone."""
    values: dict[str, Any] = {"evaluation.tokens": None if held_out is None else len(held_out.stream)}
    # All ranks of a pipeline measure.
    values["logging.trace"] = settings.logging.trace is not None
    if not isinstance(samples, Growing):
        values |= {"data.tokens": len(samples.stream), "data.documents": samples.stream.documents}
    return values


def _by_length(settings: "Settings", mesh: ParallelMesh) -> ByLength | None:
    """What shares documents out to groups of ranks, with ``parallel.cp_groups = "by_length"``."""
    from parallel_ops.train.planner_bridge import model_of

    if settings.parallel.cp_groups == "fixed":
        return None
    return ByLength(mesh.size("loss"), mesh.rank("loss"), pair_work(model_of(settings)))


def build_model(settings: "Settings", mesh: ParallelMesh, device: torch.device, model: nn.Module | None) -> nn.Module:
    """``model``, or that of ``settings.model`` with its initial or pretrained weights, parallelized over ``mesh``."""
    precision, kept, lora = settings.precision, settings.recompute, settings.lora
    options: Any = {
        "recompute_every": kept.every, "compile": settings.run.compile, "cp_layout": settings.parallel.cp_layout,
        "cp_groups": settings.parallel.cp_groups, "activation_offload": kept.offload,
        "offload_in_flight": kept.offload_in_flight, "offload_least_bytes": kept.offload_least_bytes,
        "precision": precision.linears, "expert_precision": precision.experts, "emulated": precision.fp8_emulation,
        "float8_bf16_blocks": precision.fp8_bf16_layers,
    }  # fmt: skip
    for key, recipe in precision.float8.items():
        if problem := None if precision.fp8_emulation else device_problem(device, recipe):
            raise ValueError(
                f'precision.{key}: {problem}; set precision.{key} = "bf16", or precision.fp8_emulation = true'
            )
    if model is not None:
        if lora is not None:
            raise ValueError("Trainer: lora needs settings.model; leave out the argument model")
        patterns.check(settings, [plain_name(name) for name, _ in model.named_parameters()])
        patterns.freeze(model, settings.model.freeze)
        return parallelize(model.to(device), mesh, settings.plan, **options)
    folder = settings.model.dir
    if folder is not None:
        Transformer.check_pretrained(folder, settings.config)
    empty = Transformer(
        settings.config, overlap=settings.model.overlap, grad_reduce=settings.model.grad_reduce, device="meta"
    )
    if lora is not None:
        add_adapters(empty, lora.options)
    if settings.model.freeze or settings.optimizer.groups:
        patterns.check(settings, patterns.names_of(settings))
        patterns.freeze(empty, settings.model.freeze)
    built = parallelize(empty, mesh, settings.plan, **options)
    # Offloaded parameters stay on the CPU: FSDP2 brings them to the device, but no buffers.
    built.to_empty(device="cpu" if settings.plan.offload != "none" else device)
    for module in built.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    if folder is None:
        built.reset_parameters()  # type: ignore[operator]
    else:
        # Another rotary base, say, is trained from the same weights.
        built.load_pretrained(folder, strict=not settings.model.shape)  # type: ignore[operator]
        if lora is not None:
            built.reset_parameters(only=LoraAdapter)  # type: ignore[operator]
    return built


def build_loader(
    settings: "Settings", mesh: ParallelMesh, model: nn.Module, vocabulary: int | None, pinned: bool,
    samples: AnySamples, *, grouped: bool = False,
) -> Loader:  # fmt: skip
    """The micro-batches of this rank's replica; see ``Loader``. ``grouped``: by ``parallel.cp_groups``."""
    plan = settings.plan
    return Loader(
        samples, global_batch=plan.global_batch, micro_batch=plan.micro_batch, replicas=mesh.size("dp"),
        replica=mesh.rank("dp"), vocabulary=vocabulary, pinned=pinned,
        layout=getattr(model, "sequence_layout", None), by_length=_by_length(settings, mesh) if grouped else None,
    )  # fmt: skip
