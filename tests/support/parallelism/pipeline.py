"""Two pipeline stages on each of two ranks, each a layer over two tensor-parallel ranks, under torch's schedules."""

import collections
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc, stage_backward_input

from parallel_ops import rms_norm
from parallel_ops.comm.transport.c10d import C10dTransport
from parallel_ops.layers import ParallelMoE, ParallelTransformerLayer
from parallel_ops.tensor_parallel import DeferredWeightGradients
from parallel_ops.tensor_parallel.linear import chunked as _chunked
from support.parallelism.layers import mesh_of, set_handles

SCHEDULES = {"1f1b": ScheduleInterleaved1F1B, "zero bubble": ScheduleInterleavedZeroBubble}
STAGES, BATCH, MICRO_BATCHES = 4, 8, 4
LAYERS: dict[str, dict[str, Any]] = {
    "llama": {"activation": "swiglu", "norm": "rms_norm", "bias": False, "qk_norm": True},
    "gpt": {},
    "sinks": {"activation": "swiglu", "norm": "rms_norm", "bias": False, "attention_bias": True, "sink": True},
}


def _nodes_outlive_outputs() -> bool:
    """False with torch 2.11: an edge to the node of a custom function does not keep it."""
    node: Any = rms_norm(torch.ones(1, 8, requires_grad=True)).grad_fn
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False


weight_halves = pytest.mark.skipif(
    not _nodes_outlive_outputs(), reason="torch's stage_backward_weight finds custom functions freed in torch 2.11"
)


class Stage(nn.Module):
    """A layer whose batch comes first, since torch splits there."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.transpose(0, 1)).transpose(0, 1)
        return out.contiguous()


def step(
    rank: int, schedule: str, deferred: bool, kind: str = "llama"
) -> tuple[dict[str, Tensor], list[float], dict[str, int]]:
    """(this rank's gradients, losses of the micro-batches, exchanges by op) of one step of sequence-parallel layers."""
    mesh = mesh_of(pp=2, tp=2)
    torch.manual_seed(0)
    layers = [
        ParallelTransformerLayer(32, 4, tp_mesh=mesh["tp"], sequence_parallel=True, **LAYERS[kind])
        for _ in range(STAGES)
    ]
    stages = []
    for index in range(mesh.rank("pp"), STAGES, 2):
        queue = DeferredWeightGradients() if deferred else None
        set_handles(layers[index], queue, main=False)
        builder = None if queue is None else queue.dw_builder
        stages.append(
            PipelineStage(
                Stage(layers[index]), index, STAGES, torch.device("cpu"), group=mesh.group("pp"), dw_builder=builder
            )
        )
    run = SCHEDULES[schedule](stages, n_microbatches=MICRO_BATCHES, loss_fn=lambda y, t: (y - t).square().sum())
    generator = torch.Generator().manual_seed(3)
    # A rank of a stage holds half of the tokens; both get the same here.
    x, target = torch.randn(2, BATCH, 4, 32, generator=generator).unbind()
    losses: list[Tensor] = []
    with counted_exchanges() as made:
        if mesh.rank("pp") == 0:
            run.step(x.requires_grad_(), target=target, losses=losses)
        else:
            run.step(target=target, losses=losses)
    grads = {
        f"{stage.stage_index}.{name}": p.grad.to_local()
        for stage in stages
        for name, p in stage.submod.named_parameters()
    }
    return grads, [loss.item() for loss in losses], dict(made)


def chained_groups(rank: int, kind: str, sequence_parallel: bool) -> list[list[str]]:
    """Parameters that a split backward computes together although one of the ops that read them leads to another."""
    mesh, options = mesh_of(tp=2)["tp"], LAYERS.get(kind, {})
    if kind == "experts":
        options = {"mlp": ParallelMoE(
            32, 48, 4, 2, tp_mesh=mesh, sequence_parallel=sequence_parallel, bias=True, router_bias=True
        )}  # fmt: skip
    layer = ParallelTransformerLayer(32, 4, tp_mesh=mesh, sequence_parallel=sequence_parallel, **options)
    x = torch.randn(4, 2, 32, requires_grad=True)
    y = layer(x)
    names = {_get_grad_fn_or_grad_acc(p): name for name, p in layer.named_parameters()}
    # Another tensor than y, which thus keeps the graph: see _nodes_outlive_outputs.
    _, groups = stage_backward_input([y * 1], [torch.ones_like(y)], [x], layer.parameters())
    chained = []
    for group in groups:
        reached, waiting = set(), [n for node in group["intermediates"] for n, _ in node.next_functions]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in reached:
                reached.add(node)
                waiting += [n for n, _ in node.next_functions]
        if reached & set(group["intermediates"]):
            chained.append(sorted(names[p] for p in group["params"]))
    return chained


@contextlib.contextmanager
def counted_exchanges() -> Iterator[collections.Counter[str]]:
    """Counts the exchanges that overlapped linears make, by op."""
    made: collections.Counter[str] = collections.Counter()
    init, collective = _chunked.Exchange.__init__, C10dTransport._collective

    def counting(exchange: Any, op: str, *args: Any) -> None:
        made[op] += 1
        init(exchange, op, *args)

    def counting_collectives(transport: Any, op: str, *args: Any) -> Any:
        handle = collective(transport, op, *args)
        made[op] += handle is not None
        return handle

    with (
        mock.patch.object(_chunked.Exchange, "__init__", counting),
        mock.patch.object(C10dTransport, "_collective", counting_collectives),
    ):
        yield made
