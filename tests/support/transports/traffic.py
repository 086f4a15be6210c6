"""Counts what a rank sends, by dimension of the mesh and kind of collective."""

import collections
import contextlib
import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel_ops import ParallelMesh
from parallel_ops.train.config_file import settings_of
from parallel_ops.train.trainer import Trainer
from support.parallelism.layers import mesh_of_plan

# Where a collective comes from says what it is: sums in rank order travel as other kinds.
_SOURCES = {
    ("consistency.py", None): "agreement",
    ("reductions.py", None): "report",
    ("expert_use.py", None): "report",
    ("context.py", "mean"): "report",
    ("primitives.py", "all_gather"): "all-gather",
    ("primitives.py", "reduce_scatter"): "reduce-scatter",
    ("primitives.py", "all_reduce"): "all-reduce",
    ("primitives.py", "all_to_all"): "all-to-all",
    ("chunked.py", "start_gather"): "all-gather",
    ("chunked.py", "gather"): "all-gather",
    ("chunked.py", "start_scatter"): "reduce-scatter",
    ("chunked.py", "scatter"): "reduce-scatter",
    ("column_parallel_linear.py", None): "all-reduce",  # whose sums are scattered and gathered
    ("ring.py", None): "send-receive",
    ("ulysses.py", "tokens_to_heads"): "all-to-all",
    ("ulysses.py", "heads_to_tokens"): "all-to-all",
}
# Methods of a process group, by their names in torch 2.11 and in 2.13: kind, and bytes that a rank sends.
_METHODS = {
    "allreduce": ("all-reduce", lambda size, tensors, *_: 2 * (size - 1) / size * _bytes(tensors)),
    "_allgather_base": ("all-gather", lambda size, out, x, *_: (size - 1) * _bytes(x)),
    "all_gather_single": ("all-gather", lambda size, out, x, *_: (size - 1) * _bytes(x)),
    "allgather": ("all-gather", lambda size, out, x, *_: (size - 1) * _bytes(x)),
    "_reduce_scatter_base": ("reduce-scatter", lambda size, out, x, *_: (size - 1) / size * _bytes(x)),
    "reduce_scatter_single": ("reduce-scatter", lambda size, out, x, *_: (size - 1) / size * _bytes(x)),
    "reduce_scatter": ("reduce-scatter", lambda size, out, x, *_: (size - 1) / size * _bytes(x)),
    "send": ("send-receive", lambda size, tensors, *_: _bytes(tensors)),
    "broadcast": ("broadcast", lambda size, tensors, *_: _bytes(tensors)),
}
Counts = dict[tuple[str, str], float]


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else sum(map(_bytes, value))


@contextlib.contextmanager
def counted(mesh: ParallelMesh) -> Iterator[Counts]:
    """Bytes that this rank sends in the block. Sums of scalars that torch makes in C++ (of a gradient norm over sharded
    parameters) are not among them."""
    names: dict[str, str] = {}
    for name in ("efsdp", "ep", "dp", "loss", "fsdp", "dp_shard", "dp_replicate", "cp", "tp"):  # the last of a group
        if (group := mesh.group(name)) is not None:
            names[group.group_name] = name
    found: Counts = collections.defaultdict(float)

    def note(group: Any, kind: str, size: float) -> None:
        found[names.get(group.group_name, "other"), _kind(kind)] += size

    def counting(name: str, kind: str, sent: Any) -> Any:
        original = getattr(dist.ProcessGroup, name)

        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            note(group, kind, sent(group.size(), *args, *kwargs.values()))
            return original(group, *args, **kwargs)

        return mock.patch.object(dist.ProcessGroup, name, method)

    def counting_all_to_all(name: str) -> Any:
        original = getattr(dist.ProcessGroup, name)

        def method(group: Any, out: Tensor, x: Tensor, outputs: Any, inputs: Any, *rest: Any) -> Any:
            own = inputs[group.rank()] * (x.numel() // max(1, x.shape[0])) if inputs else x.numel() // group.size()
            note(group, "all-to-all", (x.numel() - own) * x.itemsize)
            return original(group, out, x, outputs, inputs, *rest)

        return mock.patch.object(dist.ProcessGroup, name, method)

    with contextlib.ExitStack() as stack:
        for name, (kind, sent) in _METHODS.items():
            if hasattr(dist.ProcessGroup, name):
                stack.enter_context(counting(name, kind, sent))
        for name in ("alltoall_base", "all_to_all_single"):
            if hasattr(dist.ProcessGroup, name):
                stack.enter_context(counting_all_to_all(name))
        yield found


def _kind(kind: str) -> str:
    """Of a collective, by those who called it: the outermost decides, but for agreements."""
    frame, found = sys._getframe(2), kind
    while frame is not None:
        file, function = frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name
        if file == "consistency.py":
            return "agreement"
        sends_rows = (file, function) in (("primitives.py", "all_to_all"), ("exchange.py", "send"))
        if sends_rows and frame.f_locals["x"].dim() == 1:
            return "weights"  # of rows for experts, which travel in a message of their own
        found = _SOURCES.get((file, None)) or _SOURCES.get((file, function)) or found
        frame = frame.f_back
    return found


def _storages(tensors: Iterable[Any]) -> int:
    local = (t._local_tensor if isinstance(t, DTensor) else t for t in tensors if t is not None)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local if t.numel()}.values())


def _sampled(trainer: Trainer) -> list[tuple[int, int, int]]:
    """What is held at the end of each forward and before the update, from now on: bytes of parameters, sharded and
    gathered, of gradients, reduced or not, and of the optimizer's state."""
    modules = set(trainer.model.modules())
    kept = [o for o in gc.get_objects() if type(o).__name__ == "FSDPParam" and o._module_info.module in modules]
    samples: list[tuple[int, int, int]] = []

    def sample(*_: Any) -> None:
        parameters = [*trainer.model.parameters(), *(o.sharded_param for o in kept)]
        parameters += [o._unsharded_param for o in kept if hasattr(o, "_unsharded_param")]
        gradients = [*(p.grad for p in parameters), *(o.unsharded_accumulated_grad for o in kept)]
        state = [t for values in trainer.optimizer.state.values() for t in values.values() if t.numel() > 1]
        samples.append((_storages(parameters), _storages(gradients), _storages(state)))

    trainer.model.register_forward_hook(sample)
    trainer.optimizer.register_step_pre_hook(sample)
    return samples


def a_step(rank: int, given: dict[str, Any]) -> tuple[Counts, list[tuple[int, int, int]]]:
    """What a step with these settings sends, and what is held in it; see ``_sampled``."""
    settings = settings_of(given)
    plan = settings.plan
    mesh = mesh_of_plan(plan)
    trainer = Trainer(settings, mesh)
    trainer.step()
    samples = _sampled(trainer)
    with counted(mesh) as counts:
        trainer.step()
    trainer.loader.close()
    return dict(counts), samples
