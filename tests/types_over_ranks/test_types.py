"""Types of values over ranks (replicated, partial, sharded), for models under plans of up to 512 ranks."""

import random
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("spmd_types")
pytest.importorskip("pydantic")

import spmd_types as spmd
from spmd_types import I, R, V
from types_over_ranks.rules import OPS, fake_world, typed
from types_over_ranks.steps import check

import parallel_ops.context_parallel
import parallel_ops.tensor_parallel  # noqa: F401
from parallel_ops.comm import ParallelMesh, copy_to_group, gather_from_group, reduce_from_group
from parallel_ops.layers import ColumnParallelLinear, Norm, RowParallelLinear
from parallel_ops.tensor_parallel import vocab_parallel_linear_cross_entropy
from parallel_ops.train.config import Settings
from support.planning import plans
from support.runs import trainer as runs

# Random settings of each size in `make test`; --plans takes more.
FEW = {8: 12, 64: 10, 512: 8}


def test_every_op_over_a_group_has_a_rule():
    """A new op over a group is not checked by the rule of local ops without anybody noticing."""
    over_groups = {
        schema.name.partition("::")[2]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("parallel_ops::") and any(a.name == "group" for a in schema.arguments)
    }
    assert {name for name in over_groups if not name.endswith("_backward")} == set(OPS)


@pytest.mark.parametrize("world", FEW)
def test_any_plan_of(world, tmp_path, pytestconfig):
    """Every op over a group gets the types that it needs; loss and borders of stages have those that are promised."""
    data, draw = runs.data_file(tmp_path), random.Random(world)
    count = pytestconfig.getoption("plans") or FEW[world]
    seen = set[str]()
    for _ in range(count):
        settings = _settings(draw, data, world)
        rank = draw.randrange(world)
        try:
            seen |= check(settings, rank)
        except (spmd.SpmdTypeError, AssertionError) as error:
            raise AssertionError(f"rank {rank} of {settings.plan.text}: {settings.model}") from error
    # Nor is it a search that finds nothing to check.
    assert seen >= {"vocab_parallel_linear_cross_entropy", "ring_attention"}
    assert seen & {"all_gather_linear", "column_parallel_linear"}


def _settings(draw: random.Random, data: Path, world: int) -> Settings:
    """Settings of any model with a plan for so many ranks."""
    while True:
        sections = plans.sections_of(draw)
        try:
            plan = plans.plan_of(draw, sections, world, {"global_batch": world, "micro_batch": 1})
            return runs.settings_of(data, **sections, **plan)
        except (ValueError, IndexError):  # refused, or no sizes that fit
            continue


# What goes wrong elsewhere, as code, by the type of x over tp: where it stands in a model.
def _unsummed_norm(mesh: ParallelMesh, x: torch.Tensor) -> object:
    """A norm over this rank's tokens whose weight gradients nobody sums."""
    return Norm(8, tp_mesh=mesh["tp"], sequence_parallel=False)(x)


def _unsummed_input(mesh: ParallelMesh, x: torch.Tensor) -> object:
    """A column-parallel GEMM without the all-reduce of its input's gradient."""
    weight = spmd.assert_type(torch.randn(4, 8, requires_grad=True), _over(mesh, V))
    return x @ weight.t()


def _bias_before_reduction(mesh: ParallelMesh, x: torch.Tensor) -> object:
    """A bias that every rank adds to its partial sum."""
    partial = spmd.assert_type(torch.randn(4, 8, requires_grad=True), _over(mesh, spmd.P))
    return reduce_from_group(partial + x, mesh.group("tp"))


def _nonlinear_of_partial(mesh: ParallelMesh, x: torch.Tensor) -> object:
    partial = spmd.assert_type(torch.randn(4, 8, requires_grad=True), _over(mesh, spmd.P))
    return reduce_from_group(nn.functional.gelu(partial), mesh.group("tp"))


def _loss_of_a_part(mesh: ParallelMesh, x: torch.Tensor) -> object:
    """Tokens sharded by sequence parallelism, given to a loss that takes them for whole."""
    weight = spmd.assert_type(torch.randn(4, 8, requires_grad=True), _over(mesh, V))
    targets = spmd.assert_type(torch.zeros(4, dtype=torch.int64), _over(mesh, I))
    return vocab_parallel_linear_cross_entropy(x, weight, targets, group=mesh.group("tp"))


def _gathered_twice(mesh: ParallelMesh, x: torch.Tensor) -> object:
    """Replicated rows gathered as if they were parts: the backward keeps a part of each gradient."""
    return gather_from_group(x, mesh.group("tp"))


def _copied_twice(mesh: ParallelMesh, x: torch.Tensor) -> object:
    """The gradient is summed over the ranks two times: Megatron-LM#7452, finding 10."""
    return copy_to_group(copy_to_group(x, mesh.group("tp")), mesh.group("tp"))


def _column_of_parts(mesh: ParallelMesh, x: torch.Tensor) -> object:
    return ColumnParallelLinear(8, 8, tp_mesh=mesh["tp"])(x)


def _row_of_the_whole(mesh: ParallelMesh, x: torch.Tensor) -> object:
    return RowParallelLinear(16, 8, tp_mesh=mesh["tp"], sequence_parallel=True)(x)


def _over(mesh: ParallelMesh, kind: object) -> dict:
    return {mesh.group("tp"): kind}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (_unsummed_norm, V), (_unsummed_input, I), (_bias_before_reduction, I), (_nonlinear_of_partial, I),
        (_loss_of_a_part, V), (_gathered_twice, I), (_copied_twice, I), (_column_of_parts, V), (_row_of_the_whole, I),
    ],
)  # fmt: skip
def test_faults_are_found(fault, kind):
    with fake_world(2):
        mesh = ParallelMesh(tp=2, device_type="cpu")
        with typed(mesh):
            x = spmd.assert_type(torch.randn(4, 8, requires_grad=True), _over(mesh, kind))
            with pytest.raises(spmd.SpmdTypeError):
                fault(mesh, x)
            assert spmd.get_local_type(copy_to_group(_whole(mesh), mesh.group("tp"))) == _axes(mesh, R)


def _whole(mesh: ParallelMesh) -> torch.Tensor:
    return spmd.assert_type(torch.randn(4, 8, requires_grad=True), _over(mesh, I))


def _axes(mesh: ParallelMesh, kind: object) -> dict:
    return spmd.get_local_type(spmd.assert_type(torch.zeros(1), _over(mesh, kind)))
