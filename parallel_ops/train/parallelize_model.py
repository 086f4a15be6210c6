"""One function that spreads a model over a mesh. The model itself knows none of it.

In this order, since each goes around what is there: tensor, sequence and context parallelism (the model's own layers
over the mesh), recomputation of blocks, ``torch.compile`` of blocks, data parallelism of blocks and then of the whole.

    zero 0    ``replicate``: gradients are all-reduced, bucket by bucket, while the backward runs
    zero 1    FSDP2; parameters stay whole, and unreduced gradients too, until the last micro-batch of a step
    zero 2    FSDP2; parameters stay whole until the last micro-batch, gradients are reduced after each
    zero 3    FSDP2; parameters are gathered block by block, in the forward and in the backward

What a rank holds between steps is sharded from 1 on: parameters, gradients and optimizer states over ``dp_shard x cp``,
which is at most what ZeRO's stage of that number shards (Rajbhandari et al., arXiv:1910.02054). Replicas of the shards
(HSDP) are ``dp_replicate``.
"""

import fnmatch
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from parallel_ops._internal.compat import replicate
from parallel_ops.comm import ParallelMesh
from parallel_ops.context_parallel.algorithm import Algorithm, Layout
from parallel_ops.models import Transformer
from parallel_ops.train.recompute import KINDS, recompute

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a model is spread over the ranks of a mesh, whose sizes say the rest.

    Attributes:
        zero: see the module; without effect where ``dp_shard x cp`` is one rank.
        sequence_parallel: activations between tensor-parallel products are split by tokens.
        layout, algorithm: of ``ring_attention``, over context-parallel ranks.
        recompute: of ``recompute.KINDS``; ``recompute_every``: of the blocks, the first of every so many.
        compile: each block is compiled.
        precision: of parameters as they are used and of activations, of ``PRECISIONS``; the parameters that the
            optimizer sees, and the reduction of gradients, are fp32.
        offload: parameters, gradients and optimizer state live in host memory; needs ``zero`` of 1 or more.
        blocks: pattern of the names of the blocks, as in ``model.named_modules()``.

    Raises:
        ValueError: naming the field that is wrong.
    """

    zero: int = 0
    sequence_parallel: bool = False
    layout: Layout = "zigzag"
    algorithm: Algorithm = "auto"
    recompute: str = "none"
    recompute_every: int = 1
    compile: bool = False
    precision: str = "fp32"
    offload: bool = False
    blocks: str = "layers.*"

    def __post_init__(self) -> None:
        for name, allowed in (("zero", (0, 1, 2, 3)), ("recompute", KINDS), ("precision", tuple(PRECISIONS))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"Spread: {name} must be one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}"
                )
        if self.recompute_every < 1:
            raise ValueError(f"Spread: recompute_every must be at least 1, got {self.recompute_every}")
        if self.offload and not self.zero:
            raise ValueError("Spread: offload needs zero of 1 or more: replicate keeps parameters on their device")


def parallelize(model: nn.Module, mesh: ParallelMesh, spread: Spread | None = None) -> nn.Module:
    """The model over the ranks of ``mesh``, ready for an optimizer. All ranks call it.

    Args:
        model: a ``Transformer`` on the meta device, which is then built over ``tp`` and ``cp`` and drawn or loaded by
            the caller (``to_empty``, then ``reset_parameters`` or ``load_pretrained``); or any module, for data
            parallelism and recomputation alone.
        spread: by default ``Spread()``.

    Returns:
        the model, the same object where ``tp`` and ``cp`` are one rank. Its gradients are means over ``dp_replicate``,
        ``dp_shard`` and ``cp``: give it losses that are means over this rank's tokens.

    Raises:
        ValueError: ``tp`` or ``cp`` for a module that is not a ``Transformer``, or for one that has its parameters
            already; pipeline or expert parallelism; no block of these names; ``offload`` without shards.
    """
    spread = Spread() if spread is None else spread
    for name in ("pp", "ep"):
        if mesh.size(name) > 1:
            raise ValueError(f"parallelize: {name} must be 1, got {mesh.size(name)}: not there yet")
    if mesh.size("tp") * mesh.size("cp") > 1:
        model = _over(model, mesh, spread)
    names = _blocks(model, spread.blocks)
    recompute(model, names, spread.recompute, every=spread.recompute_every)
    if spread.compile:
        for name in names:
            model.get_submodule(name).compile()
    shards = mesh["fsdp"] if spread.zero else None
    if spread.offload and shards is None:
        raise ValueError("parallelize: offload needs dp_shard x cp of several ranks: it is FSDP2 that offloads")
    if shards is not None:
        _shard(model, names, mesh, spread)
    elif (ranks := mesh["loss"]) is not None:
        for name in [*names, ""]:
            replicate(model.get_submodule(name), mesh=ranks, mp_policy=_policy(spread))
    return model


def _over(model: nn.Module, mesh: ParallelMesh, spread: Spread) -> nn.Module:
    """The same model, its layers and its sequences over a mesh."""
    if not isinstance(model, Transformer):
        raise ValueError(
            f"parallelize: tp and cp must be 1 for a {type(model).__name__}: of all models only "
            "parallel_ops.models.Transformer is built over their ranks here"
        )
    if model.mesh is not None or model.context.ranks > 1 or any(not p.is_meta for p in model.parameters()):
        raise ValueError(
            "parallelize: with tp or cp the model must be on the meta device, without a mesh of its own: "
            "Transformer(config, device='meta')"
        )
    dtype = next(model.parameters()).dtype
    return Transformer(
        model.config, mesh=mesh["tp"], sequence_parallel=spread.sequence_parallel, overlap=model.overlap,
        context=mesh["cp"], layout=spread.layout, algorithm=spread.algorithm, device="meta", dtype=dtype,
    )  # fmt: skip


def _blocks(model: nn.Module, pattern: str) -> list[str]:
    """The names of the blocks, in the order of the model."""
    parts = pattern.split(".")
    names = [
        name
        for name, _ in model.named_modules()
        if name
        and name.count(".") == len(parts) - 1
        and all(fnmatch.fnmatchcase(own, part) for own, part in zip(name.split("."), parts, strict=True))
    ]
    if not names:
        raise ValueError(f"parallelize: the model has no module whose name is like {pattern!r}; name its blocks")
    return names


def _policy(spread: Spread) -> MixedPrecisionPolicy:
    if spread.precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=PRECISIONS[spread.precision], reduce_dtype=torch.float32)


def _shard(model: nn.Module, names: list[str], mesh: ParallelMesh, spread: Spread) -> None:
    over = mesh["dp_replicate", "fsdp"] if mesh.size("dp_replicate") > 1 else mesh["fsdp"]
    pinned = torch.cuda.is_available()  # torch's default, and an error without an accelerator
    offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=pinned) if spread.offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": over, "mp_policy": _policy(spread), "offload_policy": offload}
    for name in names:
        fully_shard(model.get_submodule(name), reshard_after_forward=spread.zero == 3, **options)
    fully_shard(model, reshard_after_forward=False, **options)


def micro_batch(model: nn.Module, zero: int, *, last: bool) -> None:
    """Says to a parallelized model, before each forward, whether its backward is the last of a step.

    Under ``zero`` 0 and 1 gradients are reduced in the last alone; under 1 and 2 parameters stay whole until then.
    Replicas of shards add up what is reduced in the last.
    """
    if not isinstance(model, FSDPModule):  # what replicate returns is one, too
        return
    model.set_requires_gradient_sync(last or zero >= 2)
    model.set_requires_all_reduce(last)
    if zero in (1, 2):
        model.set_reshard_after_backward(last)
