"""Types of values over ranks for the package's ops, for the checker ``spmd_types``; no rank but this one runs.

A value has one type on each axis of the mesh, which says how its gradient is spread too:

    I   the same on every rank, and so is its gradient            parameters, hidden states without sequence parallelism
    R   the same on every rank, each has a part of the gradient   after ``copy_to_group``; a norm's weight over tokens
    V   each rank has another part of the value and of its gradient
    P   the value is the sum over the ranks                       what a row-parallel GEMM gives

Ops without a group follow the checker's own rule for torch ops: I stays I, R and V give V, I with a gradient never
meets V, P enters nothing that is not linear. An op over a group has a rule here: the types that its arguments must have
over the group, and the type of the result. Over all other axes it follows the rule of ops without a group.

What the checker cannot express is declared instead of derived:

- tokens become this rank's tokens by indexing with its rank (I to V over cp);
- the loss over context-parallel ranks is the mean, whose backward gives each rank its own part (V to I over cp);
- ``x.to(y)`` reads no value of y;
- a backward is not followed: that an op's gradients have the types which its rule implies is what value tests show.
"""

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import spmd_types as spmd
import spmd_types.checker
import torch.distributed as dist
from spmd_types import I, P, R, V
from spmd_types._checker import OpLinearity, infer_output_type
from spmd_types._mesh_axis import MeshAxis, _make_axis_layout
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from parallel_ops._internal.distributed.compat import resolve_group
from parallel_ops.comm import ParallelMesh, consistency
from parallel_ops.expert_parallel import dispatch, exchange
from parallel_ops.layers import parameters
from parallel_ops.models import context

Types = dict[str, tuple[Any, ...]]
SAME = (I, R)  # tokens and targets, which have no gradient


class Rule(NamedTuple):
    """The types that arguments must have over the group, by name, and the type of the result."""

    takes: Types
    gives: Any


def _linear(x: Any) -> Rule:
    return Rule({"x": (x,), "weights": (V, R), "biases": (V, R)}, V)


# By the name of the op in the dispatcher.
OPS: dict[str, Rule | Callable[[dict[str, Any]], Rule]] = {
    "comm_all_gather": Rule({"x": (V,)}, R),
    "comm_all_reduce": Rule({"x": (P, V)}, I),
    "comm_scatter": Rule({"x": SAME}, V),
    "comm_reduce_scatter": Rule({"x": (P, V)}, V),
    "comm_all_to_all": Rule({"x": (V,)}, V),
    "all_gather_linear": _linear(V),
    "column_parallel_linear": _linear(I),
    # The op sums the gradient of the bias, unless it is told that this is done elsewhere.
    "linear_reduce_scatter": lambda given: Rule(
        {"x": (V,), "weights": (V,), "biases": (R,) if given["partial_bias"] else (I,)}, V
    ),
    "ring_attention": Rule({"q": (V,), "k": (V,), "v": (V,), "sink": (R,)}, V),
    "vocab_parallel_cross_entropy": Rule({"logits": (V,), "target": SAME, "class_weight": (V, R)}, I),
    "vocab_parallel_linear_cross_entropy": lambda given: Rule(
        {"hidden": (V,) if given["parts"] > 1 else (I,), "weight": (V,), "bias": (V,), "target": SAME}, I
    ),
    "vocab_parallel_linear_log_probs": lambda given: Rule(
        {"hidden": (V,) if given["parts"] > 1 else (I,), "weight": (V,), "bias": (V,), "tokens": SAME}, I
    ),
    # The teacher's hidden states, or its logits, which are sharded over the vocabulary.
    "vocab_parallel_linear_kl_divergence": lambda given: Rule(
        {
            "hidden": (I,),
            "weight": (V,),
            "bias": (V,),
            "teacher_weight": (V,),
            "teacher": (V,) if given["teacher_weight"] is None else SAME,
        },
        I,
    ),
}

# By the name of the collective or autograd function; the last but one argument is the group's name.
FUNCTIONS: dict[str, Rule] = {
    "copy": Rule({"x": (I,)}, R),
    "reduce": Rule({"x": (P, V)}, I),
    "scatter": Rule({"x": (I,)}, V),
    "gather": Rule({"x": (V,)}, I),
    "all_gather": Rule({"x": (V,)}, R),
    "reduce_scatter": Rule({"x": (P, V)}, V),
    "all_to_all": Rule({"x": (V,)}, V),
    "_Start": Rule({"x": (V,)}, V),
    "_Finish": Rule({"x": (V,)}, V),
}
# Functions of one rank, whose result has the type of the first argument.
LOCAL = ("_Attach", "_Follow", "_Accumulating", "_Float8Linear", "_Overwritten")


class Axes:
    """The axes of a mesh that no group splits: with ``ep``, parts of ``dp_shard``, ``cp`` and ``tp``."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = mesh
        ends = [1]
        for name in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
            ends.append(ends[-1] * mesh.size(name))
        borders = sorted({*ends, mesh.size("ep")})
        self.all = [
            MeshAxis(_make_axis_layout((end // start,), (start,))) for start, end in itertools.pairwise(borders)
        ]

    def of(self, group: ProcessGroup | str | None) -> list[MeshAxis]:
        """The axes that a group is made of."""
        if group is None:
            return []
        whole = MeshAxis.of(resolve_group(group) if isinstance(group, str) else group)
        found = [axis for axis in self.all if whole >= axis]
        assert math.prod(axis.size() for axis in found) == whole.size(), (whole, self.all)
        return found

    def named(self, *names: str) -> list[MeshAxis]:
        return [axis for name in names for axis in self.of(self.mesh.group(name))]


def type_of(value: Tensor, axis: MeshAxis) -> Any:
    return spmd.get_local_type(value).get(axis) if spmd.has_local_type(value) else None


class OverGroups(TorchFunctionMode):
    """Gives the results of ops over a group their types; raises where an argument has another than its op needs."""

    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.axes, self.seen = axes, set[str]()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = functools.partial(func, *args, **kwargs)
        if (name := str(getattr(func, "_opname", ""))) in OPS:
            given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
            return self._typed(call, name, given, given["group"], OPS[name])
        cls = getattr(func, "__self__", None)
        if getattr(func, "__name__", "") == "apply" and isinstance(cls, type):
            return self._function(cls.__name__, call, args)
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], Tensor):
            return func(args[0], args[1].device, args[1].dtype)
        return call()

    def _function(self, name: str, call: Callable[[], Any], args: Any) -> Any:
        """The result of an autograd function of the package."""
        if name == "_Linear":
            op, parts, targets, _, x, *rest = args
            given = {"x": x, "weights": rest[: len(targets)], "biases": rest[len(targets) :]}
            given["partial_bias"] = parts.partial_bias
            return self._typed(call, op.name, given, parts.group, OPS[op.name])
        if name == "Collective":
            name = args[1]
        if name in FUNCTIONS:
            group = args[1].group if name in ("_Start", "_Finish") else args[-2]
            return self._typed(call, name, {"x": args[0]}, group, FUNCTIONS[name])
        if name not in LOCAL:
            return call()
        with spmd.no_typecheck():
            result = call()
        if spmd.has_local_type(args[0]):
            stamp(result, dict(spmd.get_local_type(args[0])))
        return result

    def _typed(self, call: Callable[[], Any], name: str, given: dict[str, Any], group: Any, rule: Any) -> Any:
        with spmd.no_typecheck():
            result = call()
        takes, gives = rule if isinstance(rule, Rule) else rule(given)
        axes = self.axes.of(group)
        self.seen.add(name)
        for argument, allowed in takes.items():
            for value in _typed_tensors(given.get(argument)):
                for axis in axes:
                    # Without a gradient I and R are one.
                    wanted = (*allowed, I, R) if not value.requires_grad and set(allowed) & {I, R} else allowed
                    if (found := type_of(value, axis)) not in (*wanted, None):
                        raise spmd.SpmdTypeError(f"{name}: {argument} is {found} over {axis}, not {allowed}")
        inputs = _typed_tensors([given[argument] for argument in takes if argument in given])
        if inputs:
            rest = [{a: t for a, t in spmd.get_local_type(value).items() if a not in axes} for value in inputs]
            no_grad = [not value.requires_grad for value in inputs]
            linear = OpLinearity.LINEAR if axes and len(inputs) == 1 else OpLinearity.NONLINEAR
            stamp(result, infer_output_type(rest, no_grad=no_grad, linearity=linear) | dict.fromkeys(axes, gives))
        return result


def _typed_tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and spmd.has_local_type(value)]


def stamp(result: Any, types: dict[Any, Any]) -> Any:
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            spmd.assert_type(leaf, types)
    return result


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """A default group of torch's fake backend: this process is one of ``size`` ranks, and nothing is sent.

    All ranks make the same call as this one, as far as the comparison before data knows.
    """
    dist.init_process_group("fake", rank=rank, world_size=size)
    compare, start, all_to_all = consistency._compare, exchange.start_exchange, dispatch.all_to_all

    def as_this_rank(sizes: Tensor, group: ProcessGroup) -> Tensor:
        """Sizes, which torch 2.11's backend leaves as the memory was."""
        found = all_to_all(sizes, group)
        with spmd.no_typecheck():
            return found.copy_(sizes)

    consistency._compare = lambda group, call, device: [list(call.own)] * group.size()
    exchange.start_exchange, dispatch.all_to_all = _nothing_arrives, as_this_rank
    try:
        yield
    finally:
        consistency._compare, exchange.start_exchange, dispatch.all_to_all = compare, start, all_to_all
        dist.destroy_process_group()


class _Done:
    def wait(self) -> None:
        pass


def _nothing_arrives(op: str, transport: Any, received: Tensor, sent: Tensor, rows: Any) -> _Done:
    """The fake backend does not take an exchange of which one side is empty."""
    received.zero_()
    return _Done()


@contextlib.contextmanager
def typed(mesh: ParallelMesh) -> Iterator[OverGroups]:
    """Checks the types of what runs in the block; parameters are typed where a module reads them."""
    axes = Axes(mesh)
    # Every rank has other tokens over these, so gradients of parameters are reduced over them.
    tokens = dict.fromkeys(axes.named("loss"), R)
    read, placed, mean = parameters.to_local, context.SequenceShard.shard, context.Context.mean

    def to_local(module: Any, *given: Tensor | None, partial: Any = None) -> tuple[Tensor | None, ...]:
        with spmd.no_typecheck():
            found = read(module, *given, partial=partial)
        for number, (parameter, local) in enumerate(zip(given, found, strict=True)):
            if local is None or spmd.has_local_type(local):
                continue
            types = dict(tokens)
            if isinstance(parameter, DTensor):
                replicated = isinstance(parameter.placements[0], Replicate)
                summed = replicated and partial is not None and number < len(partial) and partial[number]
                types |= dict.fromkeys(axes.of(module.group), (R if summed else I) if replicated else V)
            else:
                types |= dict.fromkeys(axes.named("tp"), I)
            spmd.assert_type(local, types)
        return found

    def shard(place: context.SequenceShard, x: Tensor) -> Tensor:
        with spmd.no_typecheck():
            mine = placed(place, x)
        if mine is not x and spmd.has_local_type(x):
            stamp(mine, spmd.get_local_type(x) | dict.fromkeys(axes.named("cp"), V))
        return mine

    def mean_loss(self: context.Context, total: Tensor, count: Tensor) -> Tensor:
        with spmd.no_typecheck():
            loss = mean(self, total, count)
        return stamp(loss, spmd.get_local_type(total) | dict.fromkeys(axes.named("cp"), I))

    with contextlib.ExitStack() as stack:
        for module in [m for name, m in sys.modules.items() if name.startswith("parallel_ops")]:
            if getattr(module, "to_local", None) is read:
                stack.callback(setattr, module, "to_local", read)
                module.to_local = to_local  # type: ignore[attr-defined]
        stack.enter_context(mock.patch.object(context.SequenceShard, "shard", shard))
        stack.enter_context(mock.patch.object(context.Context, "mean", mean_loss))
        mode = OverGroups(axes)
        with spmd_types.checker.typecheck(strict_mode="permissive"), mode:
            yield mode
