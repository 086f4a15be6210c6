"""Forwards and backwards of layers in CUDA graphs: their captures and replays.

    tensors of a call whose backward is due    x and the other arguments, y
    tensors of all calls                       parameters that FSDP2 gathers, at other addresses each time: copied
                                               before each replay; gradients of parameters, copied after it for their
                                               sum; gradients of y and of x, two in turn
    the pool of the graphs                     everything else

A layer that reads what the layer before it has written reads it there; so do their backwards.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor, Placement
from torch.utils._pytree import tree_unflatten

from parallel_ops.train.step.layer_calls import Call, Like, Unit


class _Captured(NamedTuple):
    """The graphs of a call and the tensors that they read and write.

    Attributes:
        inputs: The arguments. y: The result. grad: The gradient of the result.
        gradients: Those of the arguments and of the parameters that need one; ``None`` for no gradient.
        placements: Of gradients that are DTensors.
        read: Which gradient is that of the result of the call before; -1 for none.
    """

    forward: Any
    backward: Any
    inputs: list[Any]
    y: Tensor
    grad: Tensor
    gradients: list[Tensor | None]
    placements: list[Sequence[Placement] | None]
    read: int


class _Due(NamedTuple):
    """A captured forward whose backward is not: its graph, what the graph reads and writes, and what autograd needs.

    Attributes:
        edge: Where the gradient of the result enters. needed: Arguments and parameters that get gradients.
    """

    forward: Any
    inputs: list[Any]
    y: Tensor
    edge: GradientEdge
    parameters: list[Tensor]
    needed: list[Tensor]


class Captures:
    """The graphs of a step's calls.

    Args:
        order: Forwards, ``"F"``, and backwards, ``"B"``, as a step runs them; calls may be there several times.

    Raises:
        RuntimeError: A call does something that cannot be captured.
    """

    def __init__(self, order: Sequence[tuple[str, Call]], device: torch.device, stream: Any) -> None:
        self._device, self._stream = device, stream
        self._pool = torch.cuda.graph_pool_handle()
        self._buffers: dict[Any, Tensor] = {}
        self._captured: dict[Call, _Captured] = {}
        self._static: dict[Unit, list[Tensor]] = {}  # parameters as graphs read them
        self.units = list(dict.fromkeys(call.unit for _, call in order))
        self._addresses = self._where()
        depth: dict[Call, int] = {}
        due: dict[Call, _Due] = {}
        for kind, call in order:
            if call in self._captured:
                continue
            try:
                if kind == "F":
                    depth[call] = 0 if call.before is None else depth[call.before] + 1
                    due[call] = self._forward(call, due)
                else:
                    self._captured[call] = self._backward(call, depth[call], due.pop(call))
            except Exception as error:
                raise RuntimeError(
                    f"run.cuda_graph: {call.unit.name} of {type(call.unit.owner).__name__} cannot be captured in a "
                    f"CUDA graph: {error}; set run.cuda_graph = false"
                ) from error

    def moved(self) -> bool:
        """Whether parameters that graphs read in place are elsewhere."""
        return self._where() != self._addresses

    def _where(self) -> list[int]:
        return [_local(p).data_ptr() for unit in self.units if not unit.managed for p in unit.parameters()]

    def _buffer(self, key: Any, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor that stays where it is, the same for the same key, shape and dtype."""
        key = key, shape, dtype
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(shape, dtype=dtype, device=self._device)
        return self._buffers[key]

    def _capture(self) -> tuple[Any, Any]:
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog and the loader, query events and allocate pinned memory meanwhile.
        return graph, torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")

    def _forward(self, call: Call, due: "dict[Call, _Due]") -> "_Due":
        unit, y = call.unit, call.y
        assert y is not None
        inputs: list[Any] = []
        for at, like in enumerate(call.leaves):
            if not isinstance(like, Like):
                inputs.append(like)
            elif call.before is not None and at == call.read:
                inputs.append(due[call.before].y)
            elif at in call.lent:
                inputs.append(due[call.lent[at]].inputs[at])
            else:
                inputs.append(self._buffer((unit, call.slot, at), like.shape, like.dtype))
        given = [
            t.detach().requires_grad_(like.requires_grad) if isinstance(t, Tensor) else t
            for t, like in zip(inputs, call.leaves, strict=True)
        ]
        parameters = [self._parameter(unit, number, p) for number, p in enumerate(call.parameters)]
        self._static[unit] = [_local(p) for p in parameters]
        out = self._buffer((unit, call.slot, "y"), y.shape, y.dtype)
        (graph, capture), (enabled, dtype) = self._capture(), call.autocast
        # A cache of casts would outlive the capture.
        autocast = torch.autocast(self._device.type, dtype=dtype, enabled=enabled, cache_enabled=False)
        args, kwargs = tree_unflatten(given, call.spec)
        with unit.reading(parameters), autocast, capture:
            found = unit.forward(*args, **kwargs)
            out.copy_(found.detach())
        needed = [t for t in (*given, *parameters) if isinstance(t, Tensor) and t.requires_grad]
        return _Due(graph, inputs, out, get_gradient_edge(found), parameters, needed)

    def _backward(self, call: Call, depth: int, due: _Due) -> _Captured:
        grad, needed = self._buffer(("gradient", depth % 2), due.y.shape, due.y.dtype), due.needed
        first = [at for at, like in enumerate(call.leaves) if isinstance(like, Like) and like.requires_grad]
        keys = [("gradient", (depth - 1) % 2) if at == call.read else ("gradient of argument", at) for at in first]
        keys += [("gradient of parameter", number) for number in range(len(needed) - len(first))]
        locals = [_local(t) for t in needed]
        gradients: list[Tensor | None] = [
            self._buffer(key, t.shape, t.dtype) for key, t in zip(keys, locals, strict=True)
        ]
        placements: list[Sequence[Placement] | None] = [None] * len(needed)
        graph, capture = self._capture()
        with call.unit.reading(due.parameters), capture:  # recomputation reads them again
            found = torch.autograd.grad(due.edge, needed, grad, allow_unused=True)
            for at, t in enumerate(found):
                target = gradients[at]
                if t is None:
                    gradients[at] = None
                else:
                    assert target is not None
                    target.copy_(_local(t))
                placements[at] = t.placements if isinstance(t, DTensor) else None
        read = -1 if call.before is None else first.index(call.read)
        return _Captured(due.forward, graph, due.inputs, due.y, grad, gradients, placements, read)

    def _parameter(self, unit: Unit, number: int, p: Tensor) -> Tensor:
        """The parameter as graphs read it."""
        if not unit.managed:
            return p
        t = _local(p)
        static = self._buffer(("parameter", number), t.shape, t.dtype)
        if isinstance(p, DTensor):
            static = DTensor.from_local(
                static, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
        return nn.Parameter(static, requires_grad=p.requires_grad)

    def _load_parameters(self, unit: Unit) -> None:
        if unit.managed:
            torch._foreach_copy_(self._static[unit], [_local(p) for p in unit.parameters()])

    def run(self, call: Call, leaves: list[Any], backward: Callable[[], None]) -> Tensor:
        """Replays a forward; ``backward`` is called when its backward begins."""
        needed = [t for t in (*leaves, *call.unit.parameters()) if isinstance(t, Tensor) and t.requires_grad]
        with torch.no_grad():
            for at, (static, t) in enumerate(zip(self._captured[call].inputs, leaves, strict=True)):
                if isinstance(t, Tensor) and at not in call.lent and static.data_ptr() != t.data_ptr():
                    static.copy_(t)
            call.sources = {at: leaves[at] for at in call.sources}
            self._load_parameters(call.unit)
            self._captured[call].forward.replay()
        y: Tensor = _Replay.apply(self, call, backward, *needed)
        return y

    def result(self, call: Call) -> Tensor:
        return self._captured[call].y.detach()

    def run_backward(self, call: Call, grad: Tensor) -> Iterator[Tensor | None]:
        """Replays a backward: the gradients of arguments and parameters."""
        captured = self._captured[call]
        if captured.grad.data_ptr() != grad.data_ptr():
            captured.grad.copy_(grad)
        self._load_parameters(call.unit)
        captured.backward.replay()
        given = [p for p in call.parameters if p.requires_grad]
        arguments = len(captured.gradients) - len(given)
        for at, (t, placements) in enumerate(zip(captured.gradients, captured.placements, strict=True)):
            if t is None:
                yield None
            elif at == captured.read:
                yield t.detach()  # the backward of the layer before reads it there
            elif placements is None:
                yield t.clone()
            else:
                whole = given[at - arguments]
                assert isinstance(whole, DTensor)
                yield DTensor.from_local(
                    t.clone(), whole.device_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
                )


class _Replay(torch.autograd.Function):
    """The node of a replayed call; its inputs are those that get gradients."""

    @staticmethod
    def forward(ctx: Any, captures: Captures, call: Call, backward: Callable[[], None], *_: Tensor) -> Tensor:
        ctx.replayed = captures, call, backward
        return captures.result(call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        captures, call, backward = ctx.replayed
        backward()
        return None, None, None, *captures.run_backward(call, grad)


def _local(t: Tensor) -> Tensor:
    """This rank's part, without gradients."""
    return t._local_tensor if isinstance(t, DTensor) else t.detach()
