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


@dataclasses.dataclass(frozen=True)
class Operation:
    """Made by the functions of this module.

    Args:
        kind: which of NCCL's operations: the name of the function here, or ``"recv"``.
        input: the tensor that is read; ``None`` for a receive.
        output: the tensor that is written; ``None`` for a send. That of an all-reduce may be ``input`` itself.
        reduction: ``"sum"``, ``"prod"``, ``"max"``, ``"min"`` or ``"avg"``.
        peer: the other rank.
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


def to_call(op: str, operation: Operation, device: torch.device, size: int) -> Call:
    """The operation as the binding takes it. Raises TypeError or ValueError for one that cannot be done."""
    if not isinstance(operation, Operation):
        raise TypeError(f"{op}: operations must be made by this module's functions, got {type(operation).__name__}")
    kind = operation.kind
    where = f"{op}: {kind}"
    if not 0 <= operation.peer < size:
        raise ValueError(f"{where}: the peer must be one of the {size} ranks, got {operation.peer}")
    _check_tensors(where, operation, device)
    x, out = operation.input, operation.output
    tensor = x if x is not None else out
    assert tensor is not None
    if kind == "all_reduce":
        if tensor.dtype not in _TYPES:
            raise TypeError(f"{where}: NCCL cannot reduce {tensor.dtype}")
        if operation.reduction not in _REDUCTIONS:
            raise ValueError(f"{where}: reduction must be one of {list(_REDUCTIONS)}, got {operation.reduction!r}")
        count, dtype = tensor.numel(), _TYPES[tensor.dtype]
    else:
        count, dtype = tensor.nbytes, _UINT8
    return Call(
        kind,
        input=0 if x is None else x.data_ptr(),
        output=0 if out is None else out.data_ptr(),
        count=count,
        type=dtype,
        op=_REDUCTIONS.get(operation.reduction, 0),
        peer=operation.peer,
    )


def _check_tensors(where: str, operation: Operation, device: torch.device) -> None:
    for name, tensor in (("input", operation.input), ("output", operation.output)):
        if tensor is None:
            if name in _needed(operation.kind):
                raise TypeError(f"{where}: the {name} must be a tensor, got None")
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
    if x is not None and out is not None and x.numel() != out.numel():
        raise ValueError(f"{where}: input and output must have one size, got {x.numel()} and {out.numel()} elements")


def _needed(kind: str) -> set[str]:
    return {"send": {"input"}, "recv": {"output"}}.get(kind, {"input", "output"})
