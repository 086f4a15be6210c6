"""The forward of a training step under a plan, typed: every stage that a rank of the pipeline has, loss and borders."""

import dataclasses
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import I, V
from torch import Tensor
from torch.distributed.tensor import DTensor
from types_over_ranks.rules import Axes, fake_world, typed

from parallel_ops.comm import ParallelMesh
from parallel_ops.models import Transformer
from parallel_ops.pipeline_parallel.cut import cut
from parallel_ops.planner.plan import Plan
from parallel_ops.train.config import Settings
from parallel_ops.train.parallelize_model import PRECISIONS, parallelize


def check(settings: Settings, rank: int = 0) -> set[str]:
    """Runs the forward of the model of ``settings`` on one rank of its plan; returns the ops over groups that ran.

    Raises:
        SpmdTypeError: A value has another type than an op needs. AssertionError: The loss or the output of a stage has
            another type than the next reader takes it for.
    """
    # Values have the same types where they are computed again. Even shards: of uneven ones the fake ranks have others.
    plan = dataclasses.replace(settings.plan, recompute="none")
    config = dataclasses.replace(settings.config, seq_length=4 * plan.cp * plan.tp, vocab_size=8 * plan.tp)
    with fake_world(plan.gpus, rank):
        mesh = ParallelMesh(
            pp=plan.pp, dp_replicate=plan.dp_replicate, dp_shard=plan.dp_shard, cp=plan.cp, tp=plan.tp, ep=plan.ep,
            device_type="cpu",
        )  # fmt: skip
        model = parallelize(Transformer(config, device="meta"), mesh, plan)
        model.to_empty(device="cpu")
        for parameter in model.parameters():  # as an initialisation would, which asks other ranks for uneven shards
            torch.nn.init.normal_(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
        seen = set[str]()
        stages = [None] if plan.pp == 1 else cut(config.num_layers, plan).on(mesh.rank("pp"))
        for stage in stages:
            seen |= _forward(model, mesh, plan, stage)
        return seen


class _NoLoads:
    """The loads of experts in other stages."""

    layers = 1

    def add(self, load: Tensor) -> None:
        pass

    def mean(self) -> Tensor:
        raise AssertionError("only a backward reads it")


def _forward(model: Transformer, mesh: ParallelMesh, plan: Plan, stage: int | None) -> set[str]:
    config = model.config
    tokens, targets = torch.randint(config.vocab_size, (2, config.seq_length, 2))
    options: dict[str, Any] = {} if config.experts is None else {"aux_scale": 1.0}
    if stage is not None:
        options |= {"stage": stage, "aux_loads": _NoLoads()}
    with typed(mesh) as mode:
        axes = mode.axes
        whole = dict.fromkeys(axes.named("tp", "cp"), I) | dict.fromkeys(axes.named("dp"), V)
        stream = dict.fromkeys(axes.named("tp"), V if plan.sequence_parallel and plan.tp > 1 else I)
        stream |= dict.fromkeys(axes.named("cp", "dp"), V)
        for value in (tokens, targets):
            spmd.assert_type(value, whole)
        if stage:
            with spmd.no_typecheck():
                # Over data-parallel ranks a stage sends what it has computed; without, autocast takes any dtype.
                dtype = PRECISIONS[plan.dtype] if mesh["loss"] is not None else torch.float32
                hidden = torch.randn(model.stream_shape(*tokens.shape), dtype=dtype, requires_grad=True)
                options["hidden_states"] = hidden
            spmd.assert_type(options["hidden_states"], stream)
        out: Tensor = model(tokens, targets, **options)
        last = stage is None or stage == cut(config.num_layers, plan).count - 1
        _expect(out, whole if last else stream, axes)
    return mode.seen


def _expect(value: Tensor, types: dict[Any, Any], axes: Axes) -> None:
    found = spmd.get_local_type(value)
    assert found == types, f"{found} over {axes.all}, not {types}"
