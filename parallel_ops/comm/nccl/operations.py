"""Operations of a communicator on tensors: one small object each, checked before any is started.

    communicator.enqueue("ring step", [send(mine, right), receive(theirs, left)])

Data is moved as bytes, so every dtype can be; reductions need one that NCCL can add.
"""

import dataclasses

import torch
from torch import Tensor

from parallel_ops._nccl import Call

_UINT8 = 1
_TYPES = {
    torch.int8: 0,
    torch.uint8: _UINT8,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
    torch.float8_e4m3fn: 10,
    torch.float8_e5m2: 11,
}
_REDUCTIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")


@dataclasses.dataclass(frozen=True)
class Operation:
    """Made by the functions of this module.

    Args:
        kind: which of NCCL's operations: the name of the function here, or ``"recv"``.
        input: the tensor that is read; ``None`` where this rank has none.
        output: the tensor that is written; ``None`` where this rank has none. May be ``input`` itself where NCCL
            works in place.
        reduction: ``"sum"``, ``"prod"``, ``"max"``, ``"min"`` or ``"avg"``.
        peer: the other rank, or the root.
    """

    kind: str
    input: Tensor | None = None
    output: Tensor | None = None
    reduction: str = "sum"
    peer: int = 0


def send(x: Tensor, peer: int) -> Operation:
    """``x`` goes to rank ``peer``."""
    return Operation("send", x, peer=peer)


def receive(out: Tensor, peer: int) -> Operation:
    """``out`` is filled by what rank ``peer`` sends."""
    return Operation("recv", output=out, peer=peer)


def all_reduce(out: Tensor, x: Tensor, reduction: str = "sum") -> Operation:
    """``out``, as large as ``x``, becomes the reduction of every rank's ``x``."""
    return Operation("all_reduce", x, out, reduction)


def reduce_scatter(out: Tensor, x: Tensor, reduction: str = "sum") -> Operation:
    """``out`` becomes this rank's part of the reduction; ``x`` is as large as all parts together."""
    return Operation("reduce_scatter", x, out, reduction)


def all_gather(out: Tensor, x: Tensor) -> Operation:
    """``out`` becomes every rank's ``x``, in rank order."""
    return Operation("all_gather", x, out)


def broadcast(out: Tensor, x: Tensor | None, root: int) -> Operation:
    """``out`` becomes the ``x`` of rank ``root``; the others may pass ``None``."""
    return Operation("broadcast", x, out, peer=root)


def reduce(out: Tensor | None, x: Tensor, root: int, reduction: str = "sum") -> Operation:
    """``out`` of rank ``root`` becomes the reduction of every rank's ``x``; the others may pass ``None``."""
    return Operation("reduce", x, out, reduction, root)


def all_to_all(out: Tensor, x: Tensor) -> Operation:
    """Part i of ``x`` goes to rank i, whose part of this rank's number in ``out`` it becomes. From NCCL 2.28."""
    return Operation("all_to_all", x, out)


def gather(out: Tensor | None, x: Tensor, root: int) -> Operation:
    """``out`` of rank ``root`` becomes every rank's ``x``, in rank order. From NCCL 2.28."""
    return Operation("gather", x, out, peer=root)


def scatter(out: Tensor, x: Tensor | None, root: int) -> Operation:
    """``out`` becomes this rank's part of the ``x`` of rank ``root``. From NCCL 2.28."""
    return Operation("scatter", x, out, peer=root)


def to_call(op: str, operation: Operation, device: torch.device, rank: int, size: int) -> Call:
    """The operation as the binding takes it. Raises TypeError or ValueError for one that cannot be done."""
    if not isinstance(operation, Operation):
        raise TypeError(f"{op}: operations must be made by this module's functions, got {type(operation).__name__}")
    kind = operation.kind
    where = f"{op}: {kind}"
    if not 0 <= operation.peer < size:
        raise ValueError(f"{where}: the peer or root must be one of the {size} ranks, got {operation.peer}")
    _check_tensors(where, operation, device, rank)
    x, out = operation.input, operation.output
    numel = _check_sizes(where, operation, rank, size)
    tensor = x if x is not None else out
    if tensor is None:
        raise ValueError(f"{where}: neither an input nor an output was given")
    if kind in _REDUCING:
        if tensor.dtype not in _TYPES:
            raise TypeError(f"{where}: NCCL cannot reduce {tensor.dtype}")
        if operation.reduction not in _REDUCTIONS:
            raise ValueError(f"{where}: reduction must be one of {list(_REDUCTIONS)}, got {operation.reduction!r}")
        count, dtype = numel, _TYPES[tensor.dtype]
    else:
        count, dtype = numel * tensor.element_size(), _UINT8
    return Call(
        kind,
        input=0 if x is None else x.data_ptr(),
        output=0 if out is None else out.data_ptr(),
        count=count,
        type=dtype,
        op=_REDUCTIONS.get(operation.reduction, 0),
        peer=operation.peer,
    )


def _check_tensors(where: str, operation: Operation, device: torch.device, rank: int) -> None:
    for name, tensor in (("input", operation.input), ("output", operation.output)):
        if tensor is None:
            if name in _needed(operation, rank):
                raise ValueError(f"{where}: rank {rank} needs an {name} tensor, got None")
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{where}: the {name} must be a tensor, got {type(tensor).__name__}")
        if tensor.device != device:
            raise ValueError(f"{where}: the {name} is on {tensor.device}, but this communicator works on {device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{where}: the {name} must be contiguous, got strides {tensor.stride()}")
    x, out = operation.input, operation.output
    if x is not None and out is not None and x.dtype != out.dtype:
        raise TypeError(f"{where}: input and output must have one dtype, got {x.dtype} and {out.dtype}")


def _needed(operation: Operation, rank: int) -> set[str]:
    kind, at_root = operation.kind, operation.peer == rank
    if kind == "send":
        return {"input"}
    if kind == "recv":
        return {"output"}
    if kind in ("broadcast", "scatter"):
        return {"input", "output"} if at_root else {"output"}
    if kind in ("reduce", "gather"):
        return {"input", "output"} if at_root else {"input"}
    return {"input", "output"}


def _check_sizes(where: str, operation: Operation, rank: int, size: int) -> int:
    """The number of elements that NCCL's function counts: those of one part."""
    kind = operation.kind
    x = None if operation.input is None else operation.input.numel()
    out = None if operation.output is None else operation.output.numel()
    if kind in ("send", "recv"):
        return (x if out is None else out) or 0
    if kind in ("gather", "reduce") and operation.peer != rank:
        return x or 0
    if kind in ("scatter", "broadcast") and operation.peer != rank:
        return out or 0
    if x is None or out is None:
        raise ValueError(f"{where}: rank {rank} needs an input and an output")
    if kind == "all_to_all" and x % size:
        raise ValueError(f"{where}: the input has {x} elements, which {size} ranks cannot split evenly")
    factor = size if kind in ("all_gather", "gather", "reduce_scatter", "scatter") else 1
    part, whole = (out, x) if kind in ("reduce_scatter", "scatter") else (x, out)
    if whole != part * factor:
        larger, smaller = ("input", "output") if kind in ("reduce_scatter", "scatter") else ("output", "input")
        raise ValueError(
            f"{where}: the {larger} has {whole} elements, but must have {part * factor}: "
            f"{factor} x the {part} of the {smaller}"
        )
    return part // size if kind == "all_to_all" else part
