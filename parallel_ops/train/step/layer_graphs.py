"""Each layer's forward and backward as CUDA graphs of their own; the rest of a step is eager.

    steps 1 to 3        eager; the third records the calls of layers and of their backwards, in order
    step 4              all recorded calls are captured in that order, then replayed
    later steps         forwards and backwards of layers are replayed, in that order

So pipelines, evaluations, FSDP2's collectives and the update need not be capturable, and values of the host may change
between layers: dropout draws in the graphs from generators that are seeded outside. A layer with experts has its
attention captured, since its dispatch reads numbers of rows. Under ``data.document_mask`` it is the MLP, since
attention depends on the lengths of documents.

Graphs share one pool of memory, and a capture takes what earlier ones have freed: replays must keep the order of the
captures. A micro-batch whose backward is due has memory of its own: a graph is used again once no backward is due, so a
run without a pipeline has one for each layer, a pipeline one for each micro-batch in flight, and more where the order
asks for it.

Sources: ``torch.cuda.make_graphed_callables`` (an autograd Function that copies inputs, and replays); Transformer
Engine's function of that name (captures in the order of a pipeline's schedule); Megatron-LM's
``cuda_graph_impl="local"`` (records the order in eager steps).
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten

from parallel_ops.layers import ParallelMoE, ParallelTransformerLayer
from parallel_ops.models import Transformer
from parallel_ops.train.step.capturable import WARMUP, checked_capacity, eager_reason
from parallel_ops.train.step.forward_backward import StepInputs
from parallel_ops.train.step.graph import StepGraph
from parallel_ops.train.step.layer_calls import Call, Unit, autocast_on, described
from parallel_ops.train.step.layer_captures import Captures

if TYPE_CHECKING:
    from parallel_ops.train.config import Settings

# Forwards and backwards as a step runs them, "F" and "B".
Event = tuple[str, Call]


def units_of(model: nn.Module, settings: "Settings") -> list[Unit]:
    """The parts of this rank's layers that are captured."""
    found = []
    assert isinstance(model, Transformer)  # see ``capturable``
    for block in model.layers.values():
        layer = block._checkpoint_wrapped_module if isinstance(block, CheckpointWrapper) else block
        assert isinstance(layer, ParallelTransformerLayer)
        experts, documents = isinstance(layer.mlp, ParallelMoE), settings.data.document_mask
        managed = isinstance(block, FSDPModule)
        if not experts and not documents:
            found.append(Unit(block, "forward", (layer,), managed))
        elif layer is not block:  # recomputation would replay a part alone
            continue
        elif not documents:
            found.append(Unit(layer, "forward_attention", (layer.norm_attention, layer.attention), managed))
        elif not experts:
            found.append(Unit(layer, "forward_mlp", (layer.norm_mlp, layer.mlp), managed))
    return found


class LayerGraphs:
    """Takes the steps of a run with replayed layers. All ranks use it alike.

    Its methods are those of ``StepGraph``; no step is redone, and the optimizer takes its rates from the host.
    """

    capacity: float | None = None
    redone = False

    def __init__(self, model: nn.Module, settings: "Settings", device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._batches: list[torch.Size] = []
        self._recording = self._replaying = False
        for unit in units_of(model, settings):
            setattr(unit.owner, unit.name, functools.partial(self._call, unit))
        self.reset()

    def reset(self) -> None:
        """Forgets the graphs and frees their memory: the next steps warm up and capture anew.

        Called before process groups end, for NCCL waits for graphs that have its calls.
        """
        self._captures: Captures | None = None
        self._order: list[Event] = []  # of a step
        self._eager_steps = 0

    def step(self, given: StepInputs, compute: Callable[[StepInputs], Any]) -> Any:
        """Takes one step: returns what ``compute`` returns.

        Raises:
            RuntimeError: A layer does something that cannot be captured.
        """
        batches = [batch.tokens.shape for batch in given.batches]
        if batches != self._batches or (self._captures is not None and self._captures.moved()):
            self.reset()
            self._batches = batches
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            if self._captures is None and self._eager_steps == WARMUP:
                self._captures = Captures(self._order, self._device, self._stream)
            self._replaying, self._recording = self._captures is not None, self._eager_steps == WARMUP - 1
            self._at, self._differs = 0, False
            self._due: list[Call] = []
            self._last: tuple[Call, Tensor, list[Any]] | None = None
            try:
                results = compute(given)
            finally:
                self._eager_steps, self._last = min(self._eager_steps + 1, WARMUP), None
                recorded, self._recording, self._replaying = self._recording, False, False
            if recorded:
                self._order = shared(self._order)
        current.wait_stream(self._stream)
        if self._differs:
            warnings.warn(
                "run.cuda_graph: layers were called otherwise than when they were captured: the rest of the step was "
                "eager, and they are captured anew",
                stacklevel=2,
            )
            self.reset()
        return results

    def _call(self, unit: Unit, *args: Any, **kwargs: Any) -> Tensor:
        """A call of a layer: eager, recorded or replayed."""
        kwargs.pop("losses", None)  # of experts, which are in no unit
        if torch.is_grad_enabled() and self._recording:
            return self._record(unit, args, kwargs)
        # Frozen layers in front of all others have no backward, and no graph.
        graphed = self._captures is not None and unit in self._captures.units
        if torch.is_grad_enabled() and self._replaying and graphed and not self._differs:
            assert self._captures is not None
            leaves, spec = tree_flatten((args, kwargs))
            number, (kind, call) = self._at, self._order[self._at] if self._at < len(self._order) else ("", None)
            if call is not None and kind == "F" and call.fits(unit, leaves, spec, self._device):
                self._at += 1
                return self._captures.run(call, leaves, functools.partial(self._replays_backward, number, call))
            # To the end of the step. Backwards of what was replayed are still replayed, in their order.
            self._differs = True
        return unit.forward(*args, **kwargs)

    def _replays_backward(self, number: int, call: Call) -> None:
        """``number``: Place of the forward in the order."""
        place = self._order.index(("B", call), number)
        if place < self._at:
            raise RuntimeError("run.cuda_graph: backwards of layers run in another order than when they were captured")
        self._at = place + 1

    def _record(self, unit: Unit, args: Any, kwargs: Any) -> Tensor:
        leaves, spec = tree_flatten((args, kwargs))
        call = Call(
            unit=unit, spec=spec, leaves=described(leaves), autocast=autocast_on(self._device),
            parameters=unit.parameters(),
        )  # fmt: skip
        if self._last is not None:
            call.follow(leaves, *self._last)
        y = unit.forward(*args, **kwargs)
        if y.requires_grad:
            (call.y,) = described([y])
            taken = {other.slot for other in self._due if other.unit is unit}
            call.slot = next(n for n in itertools.count() if n not in taken)
            self._due.append(call)
            self._order.append(("F", call))
            self._last = call, y, leaves  # kept, so that no other tensor takes their memory
            y.register_hook(functools.partial(self._record_backward, call))
        return y

    def _record_backward(self, call: Call, _: Tensor) -> None:
        self._due.remove(call)
        self._order.append(("B", call))
        self._last = None


def shared(order: Sequence[Event]) -> list[Event]:
    """The same order with the same calls in stretches that are alike. A stretch ends where no backward is due."""
    found: list[Event] = []
    known: list[tuple[Any, list[Event]]] = []
    start = due = 0
    for number, (kind, _) in enumerate(order, 1):
        due += 1 if kind == "F" else -1
        if due:
            continue
        stretch = list(order[start:number])
        places = {call: place for place, (kind, call) in enumerate(stretch) if kind == "F"}
        key = [(kind, call.key(places) if kind == "F" else places[call]) for kind, call in stretch]
        stretch = next((other for other_key, other in known if other_key == key), stretch)
        known.append((key, stretch))
        found += stretch
        start = number
    if due:
        raise RuntimeError("run.cuda_graph: a layer of a step has no backward; set run.cuda_graph = false")
    return found


def graph_of(
    settings: "Settings", model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[StepGraph | LayerGraphs | None, str | None]:
    """What takes the steps of a run in graphs, by ``run.cuda_graph``, and the reason why nothing is captured."""
    kind = settings.run.cuda_graph
    reason = eager_reason(settings, model, device) if kind else None
    if not kind or reason is not None:
        return None, reason
    if kind == "layers":
        return LayerGraphs(model, settings, device), None
    return StepGraph(optimizer, device, model, checked_capacity(settings)), None
