"""The compiled binding over the fake of ``support.nccl``: communicators, and each of its calls."""

from collections.abc import Callable
from typing import Any

from parallel_ops import _nccl
from support.nccl import Fake

ID = bytes([7]) * 128


def library(fake: Fake) -> _nccl.Library:
    return _nccl.Library.open(fake.path)


def communicator(
    fake: Fake, *, size: int = 4, rank: int = 1, timeout: float = 5.0, **settings: int | str
) -> _nccl.Communicator:
    config = _nccl.Config()
    for name, value in settings.items():
        config.set(name, value)
    return _nccl.Communicator(library(fake), ID, size, rank, config, timeout)


# By the name of NCCL's function: arguments, and what the fake then writes down.
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "Send": ({"kind": "send", "input": 0xA0, "peer": 3}, "a0 count=5 type=7 peer=3"),
    "Recv": ({"kind": "recv", "output": 0xB0, "peer": 2}, "b0 count=5 type=7 peer=2"),
    "AllReduce": ({"kind": "all_reduce", "input": 0xA0, "output": 0xB0, "op": 2}, "a0 b0 count=5 type=7 op=2"),
}


def call(kind: str, count: int = 5, type: int = 7, **arguments: int) -> _nccl.Call:
    return _nccl.Call(kind, count=count, type=type, **arguments)


# What waits for other ranks, with its timeout.
METHODS: dict[str, Callable[[_nccl.Communicator, float], object]] = {
    "launch": lambda comm, timeout: comm.launch("launch", [call(**CALLS["Send"][0])], 0, timeout),
    "finalize": lambda comm, timeout: comm.finalize(timeout),
}
