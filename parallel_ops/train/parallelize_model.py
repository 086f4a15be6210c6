"""Applies a plan to a model.

The order matters, since each step wraps the result of the one before: tensor, sequence and context parallelism (the
model's own layers over the mesh), recomputation of blocks, ``torch.compile`` of blocks, data parallelism of blocks and
then of the whole model.

    zero 0    ``replicate``: gradients are all-reduced, bucket by bucket, while the backward runs
    zero 1    FSDP2; parameters, and unreduced gradients, stay whole until the last micro-batch of a step
    zero 2    FSDP2; parameters stay whole until the last micro-batch, gradients are reduced after each
    zero 3    FSDP2; parameters are gathered block by block, in the forward and in the backward

From ``zero`` 1 on, parameters, gradients and optimizer states are sharded over ``dp_shard x cp`` between steps, at most
what ZeRO's stage of that number shards (Rajbhandari et al., arXiv:1910.02054). ``dp_replicate`` replicates
the shards (HSDP).
"""

from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from parallel_ops._internal.distributed.compat import replicate
from parallel_ops._internal.module_names import matching
from parallel_ops.comm import ParallelMesh
from parallel_ops.context_parallel.calls import AlgorithmName
from parallel_ops.context_parallel.layouts import LayoutChoice
from parallel_ops.layers.experts import Experts, divide, experts_of, shard_experts
from parallel_ops.layers.linear_base import ParallelLinear
from parallel_ops.models import Transformer
from parallel_ops.models.lora import add_adapters
from parallel_ops.ops.float8_recipes import RECIPES, Precision
from parallel_ops.pipeline_parallel import ModuleChain, cut
from parallel_ops.planner.export.trainer import sharding_problems
from parallel_ops.planner.plan import Plan
from parallel_ops.train.offload import LEAST_BYTES, Offload, offload_activations
from parallel_ops.train.recompute import KINDS, recompute

# Fields of a plan that are sizes of its mesh.
MESH_SIZES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parallelize(
    model: nn.Module,
    mesh: ParallelMesh,
    plan: Plan | None = None,
    *,
    algorithm: AlgorithmName | None = None,
    cp_layout: LayoutChoice = "zigzag",
    cp_groups: Literal["fixed", "by_length"] = "fixed",
    recompute_every: int = 1,
    compile: bool = False,
    precision: Precision = "bf16",
    expert_precision: Precision | None = None,
    emulated: bool = False,
    float8_bf16_blocks: int = 1,
    activation_offload: Offload = "none",
    offload_in_flight: int = 2,
    offload_least_bytes: int = LEAST_BYTES,
    blocks: str = "layers.*",
) -> nn.Module:
    """Parallelizes a model over the ranks of ``mesh``. All ranks call it.

    Args:
        model: A ``Transformer`` on the meta device, which is built over ``tp`` and ``cp``; the caller then initialises
            or loads it (``to_empty``, then ``reset_parameters`` or ``load_pretrained``). A ``ModuleChain`` with its
            weights, for pipeline and data parallelism. Or any module, for data parallelism and recomputation alone.
        plan: Its sizes must be those of the mesh. Of the rest, ``zero``, ``sequence_parallel``, ``cp_kind``,
            ``recompute``, ``dtype`` (of parameters in use and of activations; the optimizer's parameters and the
            reduction of gradients are fp32) and ``offload`` (parameters, gradients and optimizer state in host memory)
            apply. By default fp32 with ``zero=0``.
        algorithm, cp_layout: See ``ring_attention``; ``algorithm`` overrides the plan's ``cp_kind``.
        cp_groups: ``"by_length"``: calls of the model may name ``cp_ranks``, any power of two of dp x cp.
        recompute_every: Recompute every n-th block.
        compile: Compile each block.
        precision: Of the matmuls of the blocks' ``ColumnParallelLinear`` and ``RowParallelLinear``: float8 by a recipe
            of ``ops.float8_recipes``, with the plan's ``dtype="bf16"``. emulated: Multiply in fp32, on any device.
        expert_precision: Likewise of their ``Experts``; ``None`` for ``precision``.
        float8_bf16_blocks: As many blocks at the start, and at the end, that keep bf16.
        activation_offload, offload_in_flight, offload_least_bytes: Keep activations of blocks in host memory; see
            ``train.offload``. The model has what ``offload_activations`` returns as ``activation_offload``.
        blocks: Pattern of the blocks' names in ``model.named_modules()``.

    Returns:
        The model, the same object where ``tp`` and ``cp`` are one rank. Its gradients are means over ``dp_replicate``,
        ``dp_shard`` and ``cp``: give it losses that are means over this rank's tokens.

    Raises:
        ValueError: The plan's sizes are not the mesh's; it needs pipeline or expert parallelism, or an unknown kind of
            recomputation or dtype; ``recompute="experts"`` for a model without experts; ``offload`` without shards;
            ``tp`` or ``cp`` for a module that is not a ``Transformer`` or not on the meta device; no block matches
            ``blocks``; a ``precision`` that is unknown, or float8 with another dtype or for no linear;
            ``activation_offload`` with ``compile``, or ``"all"`` with selective recomputation.
    """
    plan = _plan_of(mesh) if plan is None else plan
    _check(mesh, plan, recompute_every)
    _check_offload(plan, activation_offload, compile)
    if plan.recompute == "experts" and not _has_experts(model):
        raise ValueError("parallelize: recompute='experts' needs a model with experts of parallel_ops.layers")
    if isinstance(model, ModuleChain) and mesh.size("tp") * mesh.size("cp") == 1:
        if plan.pp > 1:
            model.keep(cut(model.num_blocks, plan), mesh.rank("pp"))
    elif mesh.size("tp") * mesh.size("cp") * mesh.size("pp") * mesh.size("ep") > 1 or cp_groups == "by_length":
        model = _over(model, mesh, plan, algorithm or cast(AlgorithmName, plan.cp_kind), cp_layout, cp_groups)
    names = _blocks(model, blocks)
    wanted: dict[type[ParallelLinear | Experts], Precision] = {
        ParallelLinear: precision,
        Experts: expert_precision or precision,
    }
    _use_float8(model, names, plan, wanted, emulated, float8_bf16_blocks)
    recompute(model, names, plan.recompute, every=recompute_every, draws=getattr(model, "draws", True))
    # A plain attribute, also of a model that has no such field.
    object.__setattr__(model, "activation_offload", offload_activations(
        model, names, activation_offload, in_flight=offload_in_flight, least_bytes=offload_least_bytes
    ))  # fmt: skip
    if compile:
        for name in names:
            model.get_submodule(name).compile()
    if plan.zero and mesh["fsdp"] is not None:
        _shard(model, names, mesh, plan)
    elif (ranks := mesh["loss"]) is not None:
        for experts in experts_of(model):
            replicate(experts, mesh=mesh.expert_shards, mp_policy=_policy(plan, experts))
            divide(experts, mesh, shards=1)
        for name in [*names, ""]:
            replicate(model.get_submodule(name), mesh=ranks, mp_policy=_policy(plan, model))
    return model


def _has_experts(model: nn.Module) -> bool:
    """True for a stage without experts of a model that has some."""
    if isinstance(model, Transformer):
        return model.config.experts is not None
    return isinstance(model, ModuleChain) or any(isinstance(module, Experts) for module in model.modules())


def _plan_of(mesh: ParallelMesh) -> Plan:
    sizes: dict[str, Any] = {name: mesh.size(name) for name in ("dp", "dp_replicate", "tp", "pp", "cp", "ep")}
    return Plan(**sizes, global_batch=sizes["dp"], dtype="fp32")


def check_sizes(caller: str, mesh: ParallelMesh, plan: Plan) -> None:
    """ValueError: The mesh has other sizes than the plan."""
    sizes = {name: getattr(plan, name) for name in MESH_SIZES}
    for name, size in sizes.items():
        if mesh.size(name) != size:
            wanted = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
            raise ValueError(
                f"{caller}: the plan has {name}={size}, the mesh {mesh.size(name)}; make it ParallelMesh({wanted})"
            )


def _check(mesh: ParallelMesh, plan: Plan, recompute_every: int) -> None:
    check_sizes("parallelize", mesh, plan)
    for key, reason in sharding_problems(plan):
        raise ValueError(f"parallelize: {key} {reason}")
    for name, allowed in (("recompute", KINDS), ("dtype", tuple(PRECISIONS))):
        if (value := getattr(plan, name)) not in allowed:
            raise ValueError(f"parallelize: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    if recompute_every < 1:
        raise ValueError(f"parallelize: recompute_every must be at least 1, got {recompute_every}")


def _check_offload(plan: Plan, activation_offload: str, compile: bool) -> None:
    if activation_offload != "none" and compile:
        raise ValueError("parallelize: activation_offload needs compile=False: compiled blocks choose what they save")
    if activation_offload == "all" and plan.recompute == "selective":
        raise ValueError(
            "parallelize: activation_offload='all' needs recompute none, full or experts: torch's selective "
            "recomputation keeps its results itself; 'inputs' works"
        )


def _over(
    model: nn.Module, mesh: ParallelMesh, plan: Plan, algorithm: AlgorithmName, cp_layout: LayoutChoice, cp_groups: str
) -> nn.Module:
    """The same model with tensor and context parallelism over a mesh."""
    if not isinstance(model, Transformer):
        raise ValueError(
            f"parallelize: tp, cp, pp and ep must be 1 for a {type(model).__name__}: of all models only "
            "parallel_ops.models.Transformer is built over their ranks here; for pp alone, make it a ModuleChain"
        )
    if model.mesh is not None or model.context.ranks > 1 or any(not p.is_meta for p in model.parameters()):
        raise ValueError(
            "parallelize: with tp, cp, pp or ep the model must be on the meta device, without a mesh of its own: "
            "Transformer(config, device='meta')"
        )
    if mesh.size("ep") > 1 and model.config.experts is None:
        raise ValueError("parallelize: ep must be 1 for a model without experts")
    dtype = next(model.parameters()).dtype
    stages = cut(model.config.num_layers, plan) if plan.pp > 1 else None
    built = Transformer(
        model.config, tp_mesh=mesh["tp"], sequence_parallel=plan.sequence_parallel, overlap=model.overlap,
        grad_reduce=model.grad_reduce, cp_mesh=mesh["cp"], cp_layout=cp_layout, algorithm=algorithm, ep_mesh=mesh["ep"],
        cp_parts=mesh.parts("loss") if cp_groups == "by_length" else None,
        stages=stages, pp_rank=mesh.rank("pp"), device="meta", dtype=dtype,
    )  # fmt: skip
    if model.lora is not None:
        add_adapters(built, model.lora)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return built


def _blocks(model: nn.Module, pattern: str) -> list[str]:
    """The names of the blocks, in model order."""
    names = matching((name for name, _ in model.named_modules()), pattern)
    if not names:
        raise ValueError(f"parallelize: the model has no module whose name is like {pattern!r}; name its blocks")
    return names


def _use_float8(
    model: nn.Module,
    names: list[str],
    plan: Plan,
    wanted: dict[type[ParallelLinear | Experts], Precision],
    emulated: bool,
    at_the_ends: int,
) -> None:
    """Sets the precision of the linears and experts of all blocks of the whole model but the first and the last
    ``at_the_ends``."""
    float8 = {kind: precision for kind, precision in wanted.items() if precision != "bf16"}
    if not float8:
        return
    text = " and ".join(dict.fromkeys(float8.values()))
    for precision in float8.values():
        if precision not in RECIPES:
            known = ", ".join(map(repr, ("bf16", *RECIPES)))
            raise ValueError(f"parallelize: precision must be one of {known}, got {precision!r}")
    if plan.dtype != "bf16":
        raise ValueError(f"parallelize: {text} needs the plan's dtype to be 'bf16', got {plan.dtype!r}")
    if at_the_ends < 0:
        raise ValueError(f"parallelize: float8_bf16_blocks must be at least 0, got {at_the_ends}")
    every = names
    if plan.pp > 1:  # a rank has some of them
        every = model.block_names  # type: ignore[assignment]
    inner = set(every[at_the_ends : len(every) - at_the_ends])
    found = [
        (f"{block}.{name}", module, precision)
        for block in names
        if block in inner
        for name, module in model.get_submodule(block).named_modules()
        for kind, precision in float8.items()
        if isinstance(module, kind)
    ]
    if not found and not (inner and plan.pp > 1):
        raise ValueError(
            f"parallelize: {text} has no linear of parallel_ops.layers in the blocks {at_the_ends} to "
            f"{len(every) - at_the_ends - 1} of {len(every)}"
        )
    for name, module, precision in found:
        multiple, sizes = RECIPES[precision].multiple, module.local_sizes
        if any(size % multiple for size in sizes):
            raise ValueError(
                f"parallelize: {precision} needs sizes that {multiple} divides, and {name} has {sizes[1]} and "
                f"{sizes[0]} on a rank"
            )
        module.precision, module.emulated = precision, emulated


def _policy(plan: Plan, model: nn.Module) -> MixedPrecisionPolicy:
    # Inputs within these are in the plan's dtype, but for weights of tokens and tables of rotary positions, which stay
    # in fp32: bf16 would turn keys by up to 0.2 % too far, and each block would round them anew.
    casts = not isinstance(model, Transformer | Experts)
    if plan.dtype == "fp32":
        return MixedPrecisionPolicy(cast_forward_inputs=casts)
    return MixedPrecisionPolicy(PRECISIONS[plan.dtype], reduce_dtype=torch.float32, cast_forward_inputs=casts)


def _shard(model: nn.Module, names: list[str], mesh: ParallelMesh, plan: Plan) -> None:
    over = mesh["dp_replicate", "fsdp"] if mesh.size("dp_replicate") > 1 else mesh["fsdp"]
    pinned = torch.cuda.is_available()  # torch's default, and an error without an accelerator
    offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=pinned) if plan.offload != "none" else OffloadPolicy()
    options: dict[str, Any] = {"mp_policy": _policy(plan, model), "offload_policy": offload}
    shard_experts(model, mesh, reshard_after_forward=plan.zero == 3, **options)
    for name in names:
        fully_shard(model.get_submodule(name), mesh=over, reshard_after_forward=plan.zero == 3, **options)
    fully_shard(model, mesh=over, reshard_after_forward=False, **options)


def micro_batch(model: nn.Module, zero: int, *, last: bool) -> None:
    """Prepares a parallelized model for the next forward and backward; ``last``: the last ones of a step.

    Under ``zero`` 0 and 1 gradients are reduced only in the last backward; under 1 and 2 parameters stay whole until
    then. Replicas of shards are summed in the last backward.
    """
    if not isinstance(model, FSDPModule):  # also True for replicate
        return
    model.set_requires_gradient_sync(last or zero >= 2)
    model.set_requires_all_reduce(last)
    if zero in (1, 2):
        model.set_reshard_after_backward(last)
