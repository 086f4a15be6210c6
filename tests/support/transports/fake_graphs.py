"""CUDA graphs on a CPU: what is captured does nothing until it is replayed, and what CUDA forbids in a capture raises.

    with fake_graphs.cuda():
        trainer = Trainer(settings)       # takes its steps by ``torch.cuda.CUDAGraph``, on the CPU

A capture records kernels (the ops that reach the dispatcher, below autograd and DTensor), collectives and their waits,
with the memory that they read and write; numbers of the host are constants. The capture's own results are destroyed,
since CUDA computes nothing then. A replay runs the same on the same memory. So a learning rate, a seed or a shape that
a step takes from the host stays what it was, as in a graph.

Forbidden, from torch/csrc and CUDA's Programming Guide ("Prohibited and unhandled operations"):

    the host reads, or an op's shape depends on values     cudaErrorStreamCaptureUnsupported (a synchronising copy)
    data of the host become a tensor of the device         a copy from pageable memory
    synchronising or querying a stream or event            cudaErrorStreamCaptureUnsupported, ...CapturedEvent
    waiting for an event from outside the capture          cudaErrorStreamCaptureIsolation
    work on a stream that has not joined the capture       it would run at once, and never again
    a stream that the capturing stream does not wait for   cudaErrorStreamCaptureUnjoined
    seeding or reading a generator's state                 CUDAGeneratorImpl raises; a replay draws from the state then
    barriers, new groups, the first call of a kind         the host waits for other ranks
    an optimizer without ``capturable``                    torch.optim raises

Memory, from c10/cuda/CUDACachingAllocator.cpp (private pools) and torch/cuda/graphs.py:

    a replay reads and writes where the capture did        memory of others that was freed or resized since: it raises
    captures of a pool take what earlier ones have freed   a replay destroys what was free when it was captured, and all
                                                           that was captured later
    results of captured ops                                undefined until a replay

FSDP2 gets streams and events of this model. Not seen are kernels within an op: that these ask nothing of the host is
their own tests'.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state
from torch.utils._python_dispatch import _pop_mode, _push_mode

from parallel_ops._internal.gradients import weight_gradients
from parallel_ops.comm import consistency
from parallel_ops.ops.experts import order, permute
from parallel_ops.pipeline_parallel import messages
from parallel_ops.train.step import capturable
from support.transports.fake_memory import Pool, forget, resized
from support.transports.fake_recording import CUDAGraph, Recorder, collective, grouped
from support.transports.fake_streams import Event, NotCapturable, Stream, now, on_stream, refuse
from support.transports.strict import _COLLECTIVES


@contextlib.contextmanager
def _capture(
    captured: CUDAGraph, *, stream: Stream, pool: Pool | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    assert now.capture is None, "two captures at a time"
    if dist.is_initialized():  # NCCL's watchdog queries events all the time
        assert capture_error_mode != "global", "another thread queries an event: cudaErrorStreamCaptureUnsafe"
    state, seed, recorder = torch.get_rng_state(), torch.initial_seed(), Recorder()
    captured.memory.begin(pool)
    with on_stream(stream):
        now.capture = captured
        stream.join({})
        # Not entered: code that asks for modes takes the way that it takes without one.
        _push_mode(recorder)
        try:
            with _patched_host():
                yield
            _check_joined(stream)
            if torch.initial_seed() != seed:
                raise NotCapturable("a generator was seeded")
        finally:
            _pop_mode()
            captured.end()
            now.capture = None
    torch.set_rng_state(state)  # numbers are drawn in replays


def _check_joined(origin: Stream) -> None:
    known = origin.clock()
    for stream in _streams:
        for key, time in stream.clock().items():
            if known.get(key, 0) < time:
                raise NotCapturable("a stream was not joined")


_streams: list[Stream] = []


@contextlib.contextmanager
def _patched_host() -> Iterator[None]:
    """What the host does without an op."""
    thread = threading.get_ident()

    def refused(owner: Any, name: str, what: str) -> Any:
        original = getattr(owner, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            # A CPU kernel may, and the thread that reads data.
            if not now.inside and threading.get_ident() == thread:
                raise NotCapturable(f"{what}: {name}")
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, method)

    with contextlib.ExitStack() as stack:
        for owner, names, what in (
            (Tensor, ("tolist", "numpy"), "the host reads a tensor"),
            (torch, ("get_rng_state", "set_rng_state", "manual_seed"), "the host reads or sets a generator"),
            (dist, ("new_group", "broadcast_object_list", "all_gather_object"), "the host waits for ranks"),
        ):
            for name in names:
                stack.enter_context(refused(owner, name, what))
        yield


class _Handle:
    """``torch.cuda`` as FSDP2 uses it."""

    Event, current_device = Event, staticmethod(lambda: 0)
    stream = staticmethod(on_stream)

    @staticmethod
    def Stream(*_: Any, **__: Any) -> Stream:
        _streams.append(made := Stream())
        return made

    @staticmethod
    def current_stream(*_: Any) -> Stream:
        return now.stream


@contextlib.contextmanager
def cuda() -> Iterator[None]:
    """The CPU is a GPU to what captures graphs and to FSDP2."""
    handle, compared = _Handle, consistency.refuse_capture

    def refuse_capture(op: str, device_type: str, what: str) -> None:
        refuse(f"{op}: {what}")
        compared(op, device_type, what)

    resize_ = torch.UntypedStorage.resize_

    def resize(memory: Any, size: int) -> Any:
        if now.capture is not None and not now.inside:
            now.capture.resizes(memory, functools.partial(resize_, memory, size))
        else:
            resized(memory)
        return resize_(memory, size)

    with contextlib.ExitStack() as stack:
        stack.callback(forget)

        def patch(*args: Any) -> None:
            stack.enter_context(mock.patch.object(*args))

        for name in ("Stream", "current_stream", "stream", "Event"):
            patch(torch.cuda, name, getattr(handle, name))
        patch(torch.cuda, "CUDAGraph", CUDAGraph)
        patch(torch.cuda, "graph", _capture)
        patch(torch.cuda, "graph_pool_handle", Pool)
        patch(torch.cuda, "synchronize", lambda *_: refuse("the host waits for the device"))
        patch(capturable, "has_graphs", lambda device: True)
        for module in (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state):
            patch(module, "_get_device_handle", lambda *_: handle)
        patch(torch.UntypedStorage, "resize_", resize)
        for name in (*_COLLECTIVES, "send", "recv"):
            if hasattr(dist.ProcessGroup, name):
                stack.enter_context(collective(name))
        # Values are checked on CPUs alone.
        patch(permute, "_check_numbers", lambda *_: None)
        patch(order, "_check_ids", lambda *_: None)
        for name in ("outer_products", "add_outer_products"):
            patch(weight_gradients, name, grouped(getattr(weight_gradients, name)))
        patch(messages, "capturing", lambda t: now.capture is not None)
        patch(consistency, "_checks_once", lambda group, device: True)
        patch(consistency, "_checked", type(consistency._checked)())
        patch(consistency, "refuse_capture", refuse_capture)
        yield
