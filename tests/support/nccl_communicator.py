"""Communicators over the fake of ``support.nccl``, on CPU tensors, whose addresses it writes down."""

import time
from collections.abc import Callable

import pytest
import torch

from parallel_ops import _nccl
from parallel_ops.comm.nccl import communicator as nccl
from parallel_ops.comm.nccl.communicator import Communicator
from support.nccl import Fake

STREAM = 0x57


class Event:
    """Done, or not, or an error of CUDA's."""

    def __init__(self, done: bool | Exception = False) -> None:
        self.done = done

    def query(self) -> bool:
        if isinstance(self.done, Exception):
            raise self.done
        return self.done


class Recorded:
    """What communicators record after a launch: ``next``."""

    def __init__(self) -> None:
        self.next = Event(done=True)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """There is no CUDA stream on a CPU: the fake takes any number for one, and events are what the test says."""
    events = Recorded()
    monkeypatch.setattr(nccl, "_stream_handle", lambda stream, device: STREAM if stream is None else stream.cuda_stream)
    monkeypatch.setattr(nccl, "_record", lambda stream, device: events.next)
    return events


def communicator(fake: Fake, *, size: int = 4, rank: int = 1, timeout: float = 5.0) -> Communicator:
    library = _nccl.Library.open(fake.path)
    native = _nccl.Communicator(library, bytes(128), size, rank, _nccl.Config(), timeout)
    return Communicator.from_native(native, library, torch.device("cpu"), timeout)


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
